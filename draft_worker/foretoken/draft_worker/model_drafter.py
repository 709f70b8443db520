"""A small language model as drafter: batched over sequences, with the target's own noise.

Every step runs one forward over all drafting sequences: their next row each, and chunks of what their KV still misses.
Rejected drafts need no undoing: KV is kept by ids, and whatever agrees with the committed ids stays (resync by ids).
For verification by rejection the noise is the drafter's own, and each draft token comes with what it was sampled from.
Guesses at its own next tokens, where a sequence brings some, are verified in the same forward by the target's own rule.
Source: shared-noise drafting, Daliri, Musco, Suresh, arXiv:2408.07978.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from foretoken.draft_worker.drafter import Drafted, DraftSequence
from foretoken.draft_worker.drafter_settings import check_names
from foretoken.engine.batch import Segment
from foretoken.engine.draft_probs import SparseProbs, sample_drafts
from foretoken.engine.runner import ModelRunner
from foretoken.engine.sampler import SampleGroup, choose_tokens
from foretoken.kernels.accept import accept_block
from foretoken.v1.types_pb2 import DRAFT_SOURCE_MODEL, DraftSource


class Guesser(Protocol):
    """Guesses what a draft model will say."""

    @property
    def source(self) -> DraftSource:
        """The provenance of its guesses."""
        ...

    def follow(self) -> None:
        """The sequence's committed ids have grown."""
        ...

    def guess(self, draft_ids: list[int], num_tokens: int) -> list[int]:
        """At most `num_tokens` guesses at what the model says after the committed ids and `draft_ids`."""
        ...


@dataclass(slots=True)
class DraftKV:
    """What the draft model has computed of a sequence, and the draft under way."""

    page_ids: list[int] = field(default_factory=list)
    kv_ids: list[int] = field(default_factory=list)
    """Ids whose KV is written, at positions [0, len(kv_ids))."""
    draft_ids: list[int] = field(default_factory=list)
    """The draft under way."""
    draft_probs: list[SparseProbs] = field(default_factory=list)
    """What each of its ids was sampled from, for sequences that want it."""
    sources: list[DraftSource] = field(default_factory=list)
    """Who proposed each of its ids."""
    guesser: Guesser | None = None
    """Guesses at this model's own tokens."""
    num_wanted: int | None = None
    """Draft tokens wanted in all; None = no request is open."""
    has_foreign_ids: bool = False
    """Whether the target committed an id this model does not have (a padded vocabulary): nothing is drafted then."""


class ModelDrafter:
    """Hosts one draft model for any number of sequences."""

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        max_prefill_rows: int,
        source: DraftSource = DRAFT_SOURCE_MODEL,
    ) -> None:
        """`source`: the provenance of its tokens."""
        self._source = source
        self._runner = runner
        self._max_rows = max_rows
        self._max_prefill_rows = max_prefill_rows
        self._caches: dict[DraftSequence, DraftKV] = {}

    @property
    def has_work(self) -> bool:
        return any(kv.num_wanted is not None for kv in self._caches.values())

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        self.open_guessed(sequence, None)

    def open_guessed(self, sequence: DraftSequence, guesser: Guesser | None) -> None:
        """`open`, whatever the settings, with guesses at the model's tokens."""
        self._caches[sequence] = DraftKV(guesser=guesser, has_foreign_ids=self._has_foreign_ids(sequence.ids))

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Keep the KV of what was guessed right: the longest common prefix with the committed ids."""
        kv = self._caches[sequence]
        kv.has_foreign_ids = kv.has_foreign_ids or self._has_foreign_ids(ids)
        num_kept = min(len(sequence.ids) - len(ids), len(kv.kv_ids))
        while num_kept < min(len(kv.kv_ids), len(sequence.ids)) and kv.kv_ids[num_kept] == sequence.ids[num_kept]:
            num_kept += 1
        del kv.kv_ids[num_kept:]
        if kv.guesser is not None:
            kv.guesser.follow()

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        kv = self._caches[sequence]
        kv.draft_ids, kv.draft_probs, kv.sources = [], [], []
        room = self._runner.info.max_context - len(sequence.ids)
        kv.num_wanted = 0 if kv.has_foreign_ids else max(0, min(num_tokens, room))
        del kv.kv_ids[len(sequence.ids) - 1 :]  # the last committed id is always fed: its row gives the first draft

    def close(self, sequence: DraftSequence) -> None:
        kv = self._caches.pop(sequence, None)
        if kv is not None:
            self._release(kv)

    def step(self) -> list[Drafted]:
        """One forward over every drafting sequence; the drafts that are now complete."""
        planned = self._plan()
        if planned:
            logits = self._runner.forward([segment for _, segment in planned])
            for seq, segment in planned:
                self._caches[seq].kv_ids.extend(segment.ids)
            drafting = [(seq, _guesses(segment)) for seq, segment in planned if segment.num_logits]
            if drafting:
                self._take_tokens(drafting, logits)
        return self._take_finished()

    def check_integrity(self) -> None:
        """Re-derive the page accounting from the open sequences; raises when it is off."""
        self._runner.page_table.check_integrity(kv.page_ids for kv in self._caches.values())

    def _plan(self) -> list[tuple[DraftSequence, Segment]]:
        """Segments of the next forward: short ones first, prefill chunks in what is left of the rows."""
        waiting = [
            (len(seq.ids) + len(kv.draft_ids) - len(kv.kv_ids), seq, kv)
            for seq, kv in self._caches.items()
            if kv.num_wanted is not None and len(kv.draft_ids) < kv.num_wanted
        ]
        waiting.sort(key=lambda entry: entry[0])
        rows_left = self._max_rows
        planned: list[tuple[DraftSequence, Segment]] = []
        for num_missing, seq, kv in waiting:
            is_chunked = num_missing > self._max_prefill_rows and bool(planned)
            num_rows = min(num_missing, rows_left, self._max_prefill_rows if is_chunked else rows_left)
            if num_rows == 0:
                break
            kv_length = len(kv.kv_ids)
            ids = (seq.ids[kv_length:] + kv.draft_ids[max(0, kv_length - len(seq.ids)) :])[:num_rows]
            num_logits = 0
            if num_rows == num_missing:
                guesses = self._guess(seq, kv, rows_left - num_rows)
                ids += guesses
                num_logits = 1 + len(guesses)
            if not self._make_room(kv, kv_length + len(ids)):
                kv.num_wanted = len(kv.draft_ids)
                continue
            self._runner.page_table.extend(kv.page_ids, kv_length + len(ids))
            planned.append((seq, Segment(page_ids=kv.page_ids, kv_length=kv_length, ids=ids, num_logits=num_logits)))
            rows_left -= len(ids)
        return planned

    def _guess(self, seq: DraftSequence, kv: DraftKV, rows_left: int) -> list[int]:
        """Guesses at the next tokens but the last that is wanted, which the forward gives in any case."""
        assert kv.num_wanted is not None
        num_tokens = min(rows_left, kv.num_wanted - len(kv.draft_ids) - 1)
        if kv.guesser is None or num_tokens < 1 or seq.wants_probs:
            return []
        guesses = kv.guesser.guess(kv.draft_ids, num_tokens)
        return [] if self._has_foreign_ids(guesses) else guesses

    def _take_tokens(self, drafting: list[tuple[DraftSequence, list[int]]], logits: Tensor) -> None:
        """Append what the model says in place of each sequence's guesses: those it agrees with, and its next token."""
        groups = [self._sample_group(seq, guesses) for seq, guesses in drafting]
        token_ids = choose_tokens(logits, groups).token_ids
        first_rows = list(accumulate((group.num_rows for group in groups), initial=0))
        private = [index for index, (seq, _) in enumerate(drafting) if seq.wants_probs]  # these have one row each
        if private:
            rows = [first_rows[index] for index in private]
            sampled = sample_drafts(logits[rows], [groups[index] for index in private])
            for index, row, (token_id, probs) in zip(private, rows, sampled, strict=True):
                token_ids[row] = token_id
                self._caches[drafting[index][0]].draft_probs.append(probs)
        for (seq, guesses), first_row in zip(drafting, first_rows, strict=False):
            kv = self._caches[seq]
            path, next_id = accept_block(token_ids[first_row : first_row + len(guesses) + 1], guesses)
            for index, draft_id in enumerate([*guesses[: len(path)], next_id]):
                kv.draft_ids.append(draft_id)
                kv.sources.append(kv.guesser.source if kv.guesser and index < len(path) else self._source)
                if draft_id in seq.params.eos_token_ids and not seq.params.ignore_eos:
                    kv.num_wanted = len(kv.draft_ids)  # nothing follows the end of the answer
                    break
            del kv.kv_ids[len(seq.ids) + len(kv.draft_ids) - 1 :]  # what refused guesses wrote

    def _sample_group(self, seq: DraftSequence, guesses: list[int]) -> SampleGroup:
        output_ids = seq.output_ids + self._caches[seq].draft_ids
        return SampleGroup(params=seq.params, prompt_ids=seq.prompt_ids, output_ids=output_ids, draft_ids=guesses)

    def _take_finished(self) -> list[Drafted]:
        finished = []
        for seq, kv in self._caches.items():
            if kv.num_wanted is not None and len(kv.draft_ids) >= kv.num_wanted:
                finished.append(Drafted(seq, kv.draft_ids, sources=kv.sources, draft_probs=kv.draft_probs))
                kv.num_wanted = None
                kv.draft_ids, kv.draft_probs, kv.sources = [], [], []
        return finished

    def _make_room(self, kv: DraftKV, length: int) -> bool:
        """Whether pages for `length` slots can be had, after taking those of sequences that are not drafting."""
        table = self._runner.page_table
        idle = [other for other in self._caches.values() if other.page_ids and other.num_wanted is None]
        while not table.can_extend(kv.page_ids, length):
            if not idle:
                return False
            self._release(idle.pop())
        return True

    def _release(self, kv: DraftKV) -> None:
        if kv.page_ids:
            self._runner.page_table.release(kv.page_ids)
        kv.page_ids = []
        kv.kv_ids = []

    def _has_foreign_ids(self, ids: list[int]) -> bool:
        return bool(ids) and max(ids) >= self._runner.info.vocab_size


def _guesses(segment: Segment) -> list[int]:
    """The segment's ids that are guesses: its last row but them gives the first token."""
    return list(segment.ids[len(segment.ids) - segment.num_logits + 1 :])
