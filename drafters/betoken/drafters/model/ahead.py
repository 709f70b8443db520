"""Drafts that a model makes ahead, while the target verifies the draft before them.

An outcome of a verification is the number of accepted ids and the next id. The likeliest outcomes are continued as
branches behind the draft under verification; the committed ids select one of them, or none.
Knows ids and how likely they are, not the model, its logits or the sequence.
Source: drafting for the likely outcomes of a verification while it runs, arXiv:2603.03251.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_LEAST_SHARE = math.log(0.02)
"""Less likely outcomes are not drafted for."""


class Candidates(NamedTuple):
    """The likeliest tokens of one position, best first; the first is the model's own token."""

    ids: Sequence[int]
    log_shares: Sequence[float]
    """Logarithm of how likely each is the target's token; see `ModelTree`."""


@dataclass(slots=True)
class Outcome:
    """A possible outcome, and the draft that continues it."""

    num_accepted: int
    """Accepted ids of the draft under verification."""
    next_id: int
    draft_ids: list[int] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    """Candidates of each id of the draft."""
    rows: list[int] = field(default_factory=list)
    """Written slots of the next id and of the draft's ids, counted from the end of the committed text."""
    is_complete: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether there is a draft, and it is complete."""
        return self.is_complete and bool(self.draft_ids)


class Continuation(NamedTuple):
    """Ids that were drafted ahead for the committed text."""

    ids: list[int]
    candidates: list[Candidates]
    rows: list[int]
    """Slots of the ids committed last, then of `ids`, as far as written, counted from the end of the text committed
    before. Empty if the KV need not move."""
    is_parallel: bool = False
    """Whether one forward chose all ids: more or fewer committed ids would change each of them."""

    def after(self, ids: Sequence[int]) -> "Continuation | None":
        """Return the continuation of `ids`; None without one."""
        num_ids = len(ids)
        if self.is_parallel or num_ids >= len(self.ids) or self.ids[:num_ids] != list(ids):
            return None
        return Continuation(self.ids[num_ids:], self.candidates[num_ids:], [])


class AheadDraft:
    """Drafts after the likeliest outcomes of one verification.

    The first forward writes the rest of the draft under verification and yields the candidates that are not known, at
    least those for the token after it. The outcomes are chosen then. Each later forward adds one token to all of them;
    with a mask token (PARD) one forward drafts for all of them.
    """

    def __init__(
        self,
        draft_ids: list[int],
        candidates: Sequence[Candidates],
        num_outcomes: int,
        end_ids: Collection[int],
        mask_token_id: int | None = None,
    ) -> None:
        """Args:
        draft_ids: the draft under verification, [K] with K > 0; drafts of outcomes become as long.
        candidates: of its first ids, all whose candidates are known.
        num_outcomes: most outcomes.
        end_ids: ids that end the answer; nothing follows them.
        mask_token_id: mask token of a PARD model; None for other models.
        """
        self.draft_ids = draft_ids
        self.num_outcomes = num_outcomes
        self.mask_token_id = mask_token_id
        self.num_outcome_rows = 1 if mask_token_id is None else len(draft_ids)
        """Rows of an outcome in a forward."""
        self.num_tokens = 0
        """Drafted tokens of all outcomes."""
        self._candidates = list(candidates)
        self._end_ids = end_ids
        self._outcomes: list[Outcome] | None = None
        self._parents = list(range(-1, len(draft_ids) - 1))

    @property
    def is_begun(self) -> bool:
        """Whether the outcomes are chosen."""
        return self._outcomes is not None

    @property
    def is_growing(self) -> bool:
        """Whether another forward adds something."""
        return not self.is_begun or bool(self.growing())

    @property
    def num_rows(self) -> int:
        """Number of slots taken behind the committed text, including the draft under verification."""
        return len(self._parents)

    @property
    def num_unknown(self) -> int:
        """Rows with logits in the first forward: of the last ids of the draft, whose candidates are not known."""
        return len(self.draft_ids) + 1 - len(self._candidates)

    def begin(self, candidates: Sequence[Candidates]) -> None:
        """Choose the outcomes. `candidates`: of the tokens whose candidates were not known, [num_unknown]."""
        self._candidates += candidates
        found: list[tuple[float, int, int]] = []
        score = 0.0
        for place, (ids, log_shares) in enumerate(self._candidates):
            drafted_id = self.draft_ids[place] if place < len(self.draft_ids) else None
            found += [
                (score + log_share, place, token_id)
                for token_id, log_share in zip(ids, log_shares, strict=True)
                if token_id != drafted_id and token_id not in self._end_ids and score + log_share >= _LEAST_SHARE
            ]
            if drafted_id not in ids:
                break  # the candidates of this position are likelier than all outcomes after it
            score += log_shares[ids.index(drafted_id)]
        self._outcomes = [Outcome(place, token_id) for _, place, token_id in heapq.nlargest(self.num_outcomes, found)]

    def growing(self) -> list[Outcome]:
        """Outcomes whose draft is not complete, the likeliest first."""
        return [outcome for outcome in self._outcomes or () if not outcome.is_complete]

    def add_rows(self, outcomes: Sequence[Outcome]) -> tuple[list[int], list[int]]:
        """Take a slot for the last id of each outcome, and slots for masks after it; return the ids and masks, and the
        parents of all slots."""
        ids: list[int] = []
        for outcome in outcomes:
            parent = outcome.rows[-1] if outcome.rows else outcome.num_accepted - 1
            outcome.rows.append(self.num_rows)
            self._parents += [parent, *range(self.num_rows, self.num_rows + self.num_outcome_rows - 1)]
            ids.append(outcome.draft_ids[-1] if outcome.draft_ids else outcome.next_id)
            if self.mask_token_id is not None:
                ids += [self.mask_token_id] * (self.num_outcome_rows - 1)
        return ids, self._parents

    def add_token(self, outcome: Outcome, candidates: Candidates) -> None:
        """Extend the draft of an outcome by the model's token."""
        token_id = candidates.ids[0]
        if not candidates.log_shares[0] > -math.inf:  # its rules allow no token
            outcome.is_complete = True
            return
        outcome.draft_ids.append(token_id)
        outcome.candidates.append(candidates)
        self.num_tokens += 1
        outcome.is_complete = len(outcome.draft_ids) == len(self.draft_ids) or token_id in self._end_ids

    def add_draft(self, outcome: Outcome, token_ids: Sequence[int], candidates: Candidates) -> None:
        """Complete the draft of an outcome. `candidates`: of its first id."""
        outcome.draft_ids += token_ids
        outcome.candidates.append(candidates)
        self.num_tokens += len(token_ids)
        outcome.is_complete = True

    def path_ids(self, outcome: Outcome) -> list[int]:
        """Ids from the end of the committed text to the last id of an outcome's draft."""
        return [*self.draft_ids[: outcome.num_accepted], outcome.next_id, *outcome.draft_ids]

    def follow(self, ids: Sequence[int]) -> Continuation | None:
        """Return the ids drafted ahead after the committed `ids`; None without any."""
        is_parallel = self.mask_token_id is not None
        for outcome in self._outcomes or ():
            num_decided = outcome.num_accepted + 1
            path = self.path_ids(outcome)
            is_decided = num_decided == len(ids) or (num_decided < len(ids) and not is_parallel)
            if is_decided and len(ids) < len(path) and path[: len(ids)] == list(ids):
                candidates, rows = outcome.candidates[len(ids) - num_decided :], outcome.rows
                return Continuation(path[len(ids) :], candidates, [*range(outcome.num_accepted), *rows], is_parallel)
        return Continuation(self.draft_ids, self._candidates[: len(self.draft_ids)], [], is_parallel).after(ids)
