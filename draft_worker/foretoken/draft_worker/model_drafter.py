"""A small language model as drafter: batched over sequences, with the target's own noise.

Every step runs one forward over all drafting sequences: their next row each, and chunks of what their KV still misses.
Rejected drafts need no undoing: KV is kept by ids, and whatever agrees with the committed ids stays (resync by ids).
For verification by rejection the noise is the drafter's own, and each draft token comes with what it was sampled from.
Source: shared-noise drafting, Daliri, Musco, Suresh, arXiv:2408.07978.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from foretoken.draft_worker.drafter import Drafted, DraftSequence
from foretoken.draft_worker.drafter_settings import check_names
from foretoken.engine.batch import Segment
from foretoken.engine.draft_probs import SparseProbs, sample_drafts
from foretoken.engine.runner import ModelRunner
from foretoken.engine.sampler import SampleGroup, choose_tokens


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
    num_wanted: int | None = None
    """Draft tokens wanted in all; None = no request is open."""
    has_foreign_ids: bool = False
    """Whether the target committed an id this model does not have (a padded vocabulary): nothing is drafted then."""


class ModelDrafter:
    """Hosts one draft model for any number of sequences."""

    def __init__(self, runner: ModelRunner, max_rows: int, max_prefill_rows: int) -> None:
        self._runner = runner
        self._max_rows = max_rows
        self._max_prefill_rows = max_prefill_rows
        self._caches: dict[DraftSequence, DraftKV] = {}

    @property
    def has_work(self) -> bool:
        return any(kv.num_wanted is not None for kv in self._caches.values())

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        self._caches[sequence] = DraftKV(has_foreign_ids=self._has_foreign_ids(sequence.ids))

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Keep the KV of what was guessed right: the longest common prefix with the committed ids."""
        kv = self._caches[sequence]
        kv.has_foreign_ids = kv.has_foreign_ids or self._has_foreign_ids(ids)
        num_kept = min(len(sequence.ids) - len(ids), len(kv.kv_ids))
        while num_kept < min(len(kv.kv_ids), len(sequence.ids)) and kv.kv_ids[num_kept] == sequence.ids[num_kept]:
            num_kept += 1
        del kv.kv_ids[num_kept:]

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        kv = self._caches[sequence]
        kv.draft_ids, kv.draft_probs = [], []
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
        logits = self._runner.forward([segment for _, segment in planned]) if planned else None
        drafting = [seq for seq, segment in planned if segment.num_logits]
        if drafting and logits is not None:
            for seq, (draft_id, probs) in zip(drafting, self._sample(logits, drafting), strict=True):
                kv = self._caches[seq]
                kv.draft_ids.append(draft_id)
                if probs is not None:
                    kv.draft_probs.append(probs)
                if draft_id in seq.params.eos_token_ids and not seq.params.ignore_eos:
                    kv.num_wanted = len(kv.draft_ids)  # nothing follows the end of the answer
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
            if not self._make_room(kv, kv_length + num_rows):
                kv.num_wanted = len(kv.draft_ids)
                continue
            self._runner.page_table.extend(kv.page_ids, kv_length + num_rows)
            ids = (seq.ids[kv_length:] + kv.draft_ids[max(0, kv_length - len(seq.ids)) :])[:num_rows]
            num_logits = 1 if num_rows == num_missing else 0
            planned.append((seq, Segment(page_ids=kv.page_ids, kv_length=kv_length, ids=ids, num_logits=num_logits)))
            kv.kv_ids.extend(ids)
            rows_left -= num_rows
        return planned

    def _sample(self, logits: Tensor, drafting: Sequence[DraftSequence]) -> list[tuple[int, SparseProbs | None]]:
        """Each row's draft token, with its distribution for sequences that want one."""
        groups = [self._sample_group(seq) for seq in drafting]
        tokens: list[tuple[int, SparseProbs | None]] = [(i, None) for i in choose_tokens(logits, groups).token_ids]
        rows = [row for row, seq in enumerate(drafting) if seq.wants_probs]
        if rows:
            for row, token in zip(rows, sample_drafts(logits[rows], [groups[row] for row in rows]), strict=True):
                tokens[row] = token
        return tokens

    def _sample_group(self, seq: DraftSequence) -> SampleGroup:
        output_ids = seq.output_ids + self._caches[seq].draft_ids
        return SampleGroup(params=seq.params, prompt_ids=seq.prompt_ids, output_ids=output_ids, draft_ids=())

    def _take_finished(self) -> list[Drafted]:
        finished = []
        for seq, kv in self._caches.items():
            if kv.num_wanted is not None and len(kv.draft_ids) >= kv.num_wanted:
                finished.append(Drafted(seq, kv.draft_ids, draft_probs=kv.draft_probs))
                kv.num_wanted = None
                kv.draft_ids, kv.draft_probs = [], []
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
