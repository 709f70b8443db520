"""Forwards that draft ahead, for all sequences of a model drafter whose drafts are under verification.

They run while no draft is requested. A sequence that cannot be drafted for ahead is drafted for when it is requested.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

from torch import Tensor

from betoken.drafters.drafter import DraftedAhead, DraftSequence
from betoken.drafters.model.ahead import AheadDraft, Candidates, Outcome
from betoken.drafters.model.parallel import ParallelChain, choose_chains
from betoken.drafters.model.sequence import DraftKV
from betoken.drafters.model.tokens import sample_group
from betoken.drafters.model.tree import ERROR_SCALE
from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, perturbed_top


class _Part(NamedTuple):
    """A sequence's part of a forward."""

    sequence: DraftSequence
    kv: DraftKV
    ahead: AheadDraft
    segment: Segment
    outcomes: Sequence[Outcome]
    """Outcomes that the rows of logits continue; empty for rows after ids of the draft under verification."""

    @property
    def groups(self) -> list[SampleGroup]:
        """The rows whose candidates are needed: the first one of each outcome, or all."""
        seq, ahead = self.sequence, self.ahead
        if not self.outcomes:
            num_known = len(ahead.draft_ids) + 1 - ahead.num_unknown
            return [sample_group(seq, ahead.draft_ids[:num_known], ahead.draft_ids[num_known:])]
        return [sample_group(seq, ahead.path_ids(outcome)) for outcome in self.outcomes]

    @property
    def num_rows(self) -> int:
        """Rows of each outcome; 1 if there are none."""
        return self.ahead.num_outcome_rows if self.outcomes else 1


class AheadSteps:
    """Drafts ahead for the sequences of one model."""

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        caches: Mapping[DraftSequence, DraftKV],
        source: str,
        mask_token_id: int | None,
    ) -> None:
        """Args:
        source: name of the drafter.
        mask_token_id: mask token of a PARD model; None for other models.
        """
        self._source = source
        self._mask_token_id = mask_token_id
        self._runner = runner
        self._max_rows = max_rows
        self._caches = caches

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return any(kv.ahead is not None and kv.ahead.is_growing for kv in self._caches.values())

    def num_outcomes(self, seq: DraftSequence, kv: DraftKV) -> int:
        """Outcomes to draft for after the draft under way; 0 if it is more than a chain of certain tokens, or if the
        model has states, which take no branches."""
        is_chain = kv.tree is None and kv.guesser is None and self._runner.page_table.snapshots is None
        return seq.num_outcomes if is_chain and not (seq.wants_probs or seq.draft_affects_output) else 0

    def note_candidates(
        self,
        sequences: Sequence[DraftSequence],
        groups: Sequence[SampleGroup],
        first_rows: Sequence[int],
        logits: Tensor,
    ) -> None:
        """Keep the candidates for the next token of sequences that are drafted for ahead; these have one row each."""
        places = [place for place, seq in enumerate(sequences) if self._caches[seq].num_outcomes]
        if places:
            kvs = [self._caches[sequences[place]] for place in places]
            rows = logits[[first_rows[place] for place in places]]
            num_top = 1 + max(kv.num_outcomes for kv in kvs)
            for kv, candidates in zip(kvs, _likeliest(rows, [groups[place] for place in places], num_top), strict=True):
                kv.candidates.append(candidates)

    def begin(self, seq: DraftSequence, kv: DraftKV) -> None:
        """Prepare to draft ahead after a finished draft, if pages are free: no other sequence gives some up for it."""
        num_tokens, length = len(kv.draft_ids), len(seq.ids)
        num_known = num_tokens if self._mask_token_id is None else 1
        if not kv.num_outcomes or not kv.page_ids or not num_tokens or len(kv.candidates) < num_known:
            return
        max_length = min(self._runner.info.max_context, seq.max_length)
        if kv.draft_ids[-1] in seq.end_ids or length + 2 * num_tokens >= max_length:
            return
        table, end = self._runner.page_table, length + num_tokens * (1 + kv.num_outcomes)
        if table.can_extend(kv.page_ids, end):
            table.extend(kv.page_ids, end)
            kv.ahead = AheadDraft(kv.draft_ids, kv.candidates, kv.num_outcomes, seq.end_ids, self._mask_token_id)

    def step(self) -> list[DraftedAhead]:
        """One forward over the sequences that are drafted for ahead; the drafts that it completed."""
        parts: list[_Part] = []
        rows_left = self._max_rows
        for seq, kv in self._caches.items():
            if kv.ahead is None or not kv.ahead.is_growing or not rows_left:
                continue
            if (part := _next_part(seq, kv, kv.ahead, rows_left)) is not None:
                parts.append(part)
                rows_left -= len(part.segment.ids)
            elif not parts:
                kv.ahead = None  # it needs more rows than a forward has
        if not parts:
            return []
        logits = self._runner.forward([part.segment for part in parts]).logits
        self._take(parts, logits)
        return [self._drafted(part, outcome) for part in parts for outcome in part.outcomes if outcome.is_whole]

    def _drafted(self, part: _Part, outcome: Outcome) -> DraftedAhead:
        seq, kv, ahead = part.sequence, part.kv, part.ahead
        key = len(seq.ids) + outcome.num_accepted + 1, outcome.next_id
        num_tokens = kv.num_ahead_tokens + ahead.num_tokens
        return DraftedAhead(seq, key, list(outcome.draft_ids), self._source, kv.num_forwards, num_tokens)

    def _take(self, parts: Sequence[_Part], logits: Tensor) -> None:
        """Choose the outcomes of sequences without any, and extend the drafts of the others'."""
        ends = list(accumulate(part.segment.num_logits for part in parts))
        rows = [range(end - part.segment.num_logits, end, part.num_rows) for part, end in zip(parts, ends, strict=True)]
        groups = [group for part in parts for group in part.groups]
        num_top = 1 + max(part.ahead.num_outcomes for part in parts)
        found = iter(_likeliest(_rows_of(logits, [row for own in rows for row in own]), groups, num_top))
        candidates = [list(islice(found, len(own))) for own in rows]
        for (seq, kv, ahead, segment, outcomes), of_rows in zip(parts, candidates, strict=True):
            kv.num_forwards += 1
            if not outcomes:
                kv.kv_ids.extend(segment.ids)
                self._runner.page_table.publish(kv.page_ids, seq.ids, len(seq.ids) - 1)
                ahead.begin(of_rows)
            elif self._mask_token_id is None:
                for outcome, of_row in zip(outcomes, of_rows, strict=True):
                    ahead.add_token(outcome, of_row)
        if self._mask_token_id is not None:
            _complete(parts, rows, candidates, logits)


def _complete(
    parts: Sequence[_Part], rows: Sequence[range], candidates: Sequence[Sequence[Candidates]], logits: Tensor
) -> None:
    """Choose the drafts of all outcomes. `rows` and `candidates`: of the first tokens of each part's drafts."""
    drafts: list[tuple[AheadDraft, Outcome, Candidates, ParallelChain]] = []
    for part, own, of_rows in zip(parts, rows, candidates, strict=True):
        for outcome, row, of_row in zip(part.outcomes, own, of_rows, strict=False):
            chain = ParallelChain(part.sequence, range(row, row + part.num_rows), part.ahead.path_ids(outcome))
            drafts.append((part.ahead, outcome, of_row, chain))
    choose_chains([chain for *_, chain in drafts], logits)
    for ahead, outcome, of_row, chain in drafts:
        ahead.add_draft(outcome, [token.token_id for token in chain.tokens], of_row)


def _next_part(seq: DraftSequence, kv: DraftKV, ahead: AheadDraft, num_rows: int) -> _Part | None:
    """At most `num_rows` rows of a sequence; None if its next step needs more."""
    length = len(seq.ids)
    if ahead.is_begun:
        outcomes, start = ahead.growing()[: num_rows // ahead.num_outcome_rows], length + ahead.num_rows
        if not outcomes:
            return None
        ids, parents = ahead.add_rows(outcomes)
        return _Part(seq, kv, ahead, Segment(kv.page_ids, start, ids, len(ids), parents), outcomes)
    start = len(kv.kv_ids)
    ids = seq.ids[start:] + ahead.draft_ids[max(0, start - length) :]
    segment = Segment(kv.page_ids, start, ids, ahead.num_unknown)
    return _Part(seq, kv, ahead, segment, ()) if len(ids) <= num_rows else None


def _likeliest(logits: Tensor, groups: Sequence[SampleGroup], num_top: int) -> list[Candidates]:
    """The likeliest tokens of each row."""
    ids, log_shares = perturbed_top(logits, groups, num_top, ERROR_SCALE)
    return [Candidates(*row) for row in zip(ids.tolist(), log_shares.tolist(), strict=True)]


def _rows_of(logits: Tensor, rows: list[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[rows]
