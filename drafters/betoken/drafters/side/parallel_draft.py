"""Chains whose positions one pass has scored, chosen token by token from left to right, for many sequences in one call.

Knows scores, not the layers that made them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from betoken.drafters.side.choice import Chooser
from betoken.drafters.side.sequence import SideDraft
from betoken.engine.sampler import SampleGroup
from betoken.engine.sparse_probs import SparseProbs

ScoreRows = Callable[[list[int], list[int], list[int]], tuple[Tensor, Sequence[float] | None]]
"""Rows [N], indices of their drafts [N], ids before them [N] -> scores [N, Vd] float32 of the draft's ids, and the
probabilities [N] that their tokens are accepted if those before them are; None if only the scores say so."""


@dataclass(slots=True, eq=False)
class ParallelDraft(SideDraft):
    """A draft under way."""

    num_wanted: int
    """Most tokens."""
    min_share: float = 0.0
    """Share that the path to a token needs, except to the first one."""
    min_confidence: float = 0.0
    """Probability of acceptance below which a token ends the draft, if it is known."""
    first_row: int = 0
    """Row that scores the first token; the rows of the others follow."""
    draft_ids: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Share of the path to each token."""
    probs: list[SparseProbs] = field(default_factory=list)
    """Distribution of each token, if needed."""
    is_complete: bool = False
    num_passes: int = 0
    """Passes of the layers so far."""

    def places(self, follows: bool) -> range:
        """Positions whose tokens can be chosen now: all, or the next if it depends on the tokens before it."""
        if self.is_complete:
            return range(0)
        seq = self.owner.draft
        has_rules = seq.params.has_rules if seq.rules is None else not seq.rules.is_empty
        first = len(self.draft_ids)
        return range(first, first + 1 if follows or has_rules else self.num_wanted)

    def group(self, place: int) -> SampleGroup:
        """The row of a position."""
        seq, num_known = self.owner.draft, len(self.draft_ids)
        output_ids = seq.output_ids + self.draft_ids
        return SampleGroup(seq.params, seq.prompt_ids, output_ids, (), seq.rules, num_ahead=place - num_known)

    @property
    def previous_id(self) -> int:
        """The token before the next one."""
        return self.draft_ids[-1] if self.draft_ids else self.owner.draft.ids[-1]

    def add(self, token_id: int, share: float, probs: SparseProbs | None = None) -> None:
        """Append a token of that share, unless the draft is complete or the token does not pay off."""
        path_share = share * (self.shares[-1] if self.shares else 1.0)
        if self.is_complete or (self.draft_ids and path_share < self.min_share):
            self.is_complete = True
            return
        self.draft_ids.append(token_id)
        self.shares.append(path_share)
        if probs is not None:
            self.probs.append(probs)
        self.is_complete = len(self.draft_ids) == self.num_wanted or token_id in self.owner.draft.end_ids


def choose_chains(drafts: Sequence[ParallelDraft], score: ScoreRows, chooser: Chooser, follows: bool = False) -> None:
    """Complete the drafts. `follows`: whether the scores of a position depend on the tokens before it."""
    while places := [(index, place) for index, draft in enumerate(drafts) for place in draft.places(follows)]:
        owners = [index for index, _ in places]
        rows = [drafts[index].first_row + place for index, place in places]
        scores, confidences = score(rows, owners, [drafts[index].previous_id for index in owners])
        tokens = _choose([drafts[index] for index in owners], [place for _, place in places], scores, chooser)
        for row, (index, (token_id, share, probs)) in enumerate(zip(owners, tokens, strict=True)):
            draft = drafts[index]
            if confidences is None:
                draft.add(token_id, share, probs)
            elif confidences[row] < draft.min_confidence:
                draft.is_complete = True
            else:
                draft.add(token_id, confidences[row], probs)


def _choose(
    drafts: Sequence[ParallelDraft], places: Sequence[int], scores: Tensor, chooser: Chooser
) -> list[tuple[int, float, SparseProbs | None]]:
    """Ids, shares and distributions of the tokens of rows, each of one draft's position."""
    groups = [draft.group(place) for draft, place in zip(drafts, places, strict=True)]
    private = [row for row, draft in enumerate(drafts) if draft.owner.draft.wants_probs]
    found: dict[int, tuple[int, float, SparseProbs | None]] = {}
    if private:
        sampled = chooser.sampled(scores[private], [groups[row] for row in private])
        found = {row: (token_id, 1.0, probs) for row, (token_id, probs) in zip(private, sampled, strict=True)}
    shared = [row for row in range(len(groups)) if row not in found]
    if shared:
        rows = scores[shared] if private else scores
        for row, (ids, log_shares) in zip(
            shared, chooser.likeliest(rows, [groups[row] for row in shared], 1), strict=True
        ):
            found[row] = ids[0], math.exp(log_shares[0]), None
    return [found[row] for row in range(len(groups))]
