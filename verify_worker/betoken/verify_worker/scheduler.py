"""Which sequences share the next forward, and who gives up pages when they run out. Knows ids and pages, no tensors.

Oldest waiting work goes first; a draft block is never split; prefill comes in chunks so that a long prompt does not
stall running streams. When pages run out the youngest sequence loses its own and is recomputed later, which changes
nothing in its tokens since every row is batch-invariant. Younger sequences start after it has gone on. Otherwise the
growing older ones would take the same pages again and again, each time with a prompt just computed. A younger sequence
takes pages from an older one only if that has waited for its next block for a while. Between two rounds all of them
wait for a moment, and taking turns would cost each its KV every time. The oldest waiting sequence can in the end take
all pages, so something always advances.
"""

import math
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from betoken.engine.bring_up.step_costs import StepCost
from betoken.engine.page_table import Found, PageTable
from betoken.engine.preemption import choose_victims
from betoken.engine.state_table import PageList
from betoken.verify_worker.sequence import VerifySequence

IDLE_GRACE_S = 0.5
"""Time in which a sequence without a draft keeps its pages from younger ones: longer than the gap between two drafts,
even with a slow drafter or many streams; short for a waiting sequence."""
_MAX_TOLD_ROWS = 256
"""Rows of prompts whose logits are in memory at a time, however many a forward may have."""
_LONGER = 1.5
"""Limit of a forward with prefill and decoding, relative to one of a single token."""


def prefill_rows(step_costs: Sequence[StepCost], least: int, most: int) -> int:
    """Prompt tokens of a forward together with decoding sequences: the largest measured number that does not make it
    much longer, from `least` to `most`."""
    one_ns = min((cost.ns for cost in step_costs), default=0)
    affordable = [cost.rows for cost in step_costs if cost.rows <= most and cost.ns <= _LONGER * one_ns]
    return max([least, *affordable])


@dataclass(slots=True)
class Work:
    """The rows of one sequence in a forward: prefill [kv_length, kv_length + num_prefill), then the block, if any.

    The nodes of a tree take slots like the ids of a chain, in the order they came.
    """

    sequence: VerifySequence
    num_prefill: int
    takes_block: bool
    draft_ids: Sequence[int]
    parents: Sequence[int] | None = None
    num_sent: int = field(init=False)
    """Last prefill rows, whose logits give the prompt's logprobs."""

    def __post_init__(self) -> None:
        end = self.sequence.kv_length + self.num_prefill
        self.num_sent = min(self.num_prefill, max(0, end - self.sequence.first_logprob_row))

    @property
    def num_logits(self) -> int:
        """Rows, the last ones, that yield logits."""
        return self.num_sent + (1 + len(self.draft_ids) if self.takes_block else 0)

    @property
    def num_rows(self) -> int:
        return self.num_prefill + (1 + len(self.draft_ids) if self.takes_block else 0)


@dataclass(slots=True)
class _Plan:
    """A forward in the making."""

    rows_left: int
    prefill_left: int
    logits_left: int
    """Remaining prefill rows that may yield logits."""
    idle_before_ns: int
    """Sequences with nothing to do since then give their pages to anybody, `time.perf_counter_ns`."""
    oldest_preempted: float
    """Smallest order of preempted sequences that wait for pages; infinity without any."""
    holders: list[VerifySequence]
    """Sequences that had pages when the plan was begun."""
    work: list[Work] = field(default_factory=list)
    has_preempted: bool = False

    def add(self, work: Work) -> None:
        self.work.append(work)
        self.rows_left -= work.num_rows
        self.prefill_left -= work.num_prefill
        self.logits_left -= work.num_sent

    def takeable(self, seq: VerifySequence) -> Iterator[VerifySequence]:
        """Holders whose pages `seq` may take: younger or idle ones without a part in the forward."""
        taking_part = {id(work.sequence) for work in self.work}
        for other in self.holders:
            is_weaker = other.order > seq.order or other.is_idle_since(self.idle_before_ns)
            if is_weaker and other.page_ids and not other.is_in_flight and id(other) not in taking_part:
                yield other


class Scheduler:
    """Plans forwards of at most `max_rows` rows, more than a block needs. While others decode, though their next blocks
    be still to come, prefill takes at most `max_prefill_tokens`, and leaves what the block that waits longest needs."""

    def __init__(
        self, page_table: PageTable, max_rows: int, max_prefill_tokens: int, idle_grace_s: float = IDLE_GRACE_S
    ) -> None:
        self.idle_grace_s = idle_grace_s
        self._page_table = page_table
        self.max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self.num_preemptions = 0
        self.num_cached_tokens = 0

    def plan(self, sequences: Collection[VerifySequence], max_in_flight: int = 1) -> list[Work]:
        """The next forward's work; empty when nothing can run before a sequence has been idle for `idle_grace_s`.

        `max_in_flight`: forwards under way among which sequences are divided.
        """
        waiting = [seq for seq in sequences if seq.wants_forward]
        waiting.sort(key=lambda seq: seq.queued_ns)
        plan = self._begin(sequences, waiting)
        num_in_flight = sum(seq.is_in_flight for seq in sequences) if max_in_flight > 1 else 0
        most = -(-(len(waiting) + num_in_flight) // max_in_flight)
        for seq in waiting:
            if plan.rows_left == 0 or len(plan.work) == most:
                break
            if not seq.page_ids and not (self._may_start(seq, plan) and self._start(seq, plan)):
                continue
            work = self._fit(seq, plan)
            if work is not None and self._make_room(seq, seq.kv_length + work.num_rows, plan):
                self._page_table.extend(seq.page_ids, seq.kv_length + work.num_rows)
                plan.add(work)
        return plan.work

    def ready(self, sequences: Iterable[VerifySequence]) -> tuple[int, int]:
        """How many sequences and rows a forward would have now, about; prompts count as one sequence, however many."""
        num_ready = num_rows = num_missing = 0
        for seq in sequences:
            if seq.wants_forward and seq.num_missing_kv:
                num_missing += seq.num_missing_kv
            elif seq.has_block:
                num_ready += 1
                num_rows += 1 + (len(seq.block.draft_ids) if seq.block is not None else 0)
        return num_ready + bool(num_missing), num_rows + min(num_missing, self._max_prefill_tokens)

    def release(self, sequence: VerifySequence) -> None:
        """Free the sequence's pages; its KV is gone but for what the page table finds again."""
        if sequence.page_ids:
            self._page_table.release(sequence.page_ids)
        sequence.page_ids = []
        sequence.kv_length = 0

    def _begin(self, sequences: Collection[VerifySequence], waiting: Sequence[VerifySequence]) -> _Plan:
        """An empty plan. While any sequence decodes, or soon will, prefill gets at most `max_prefill_tokens` tokens."""
        rows = prefill = self.max_rows
        idle_before_ns = time.perf_counter_ns() - round(self.idle_grace_s * 1e9)
        decoding = next((seq for seq in waiting if seq.num_missing_kv == 0 and not seq.awaits_draft), None)
        if decoding is not None:
            num_drafts = len(decoding.block.draft_ids) if decoding.block is not None else 0
            prefill = min(self._max_prefill_tokens, rows - 1 - num_drafts)
        elif any(
            seq.is_in_flight or (seq.is_between_blocks and not seq.is_idle_since(idle_before_ns)) for seq in sequences
        ):
            prefill = min(self._max_prefill_tokens, rows)
        oldest_preempted = min((seq.order for seq in waiting if seq.is_preempted), default=math.inf)
        holders = [seq for seq in sequences if seq.page_ids]
        return _Plan(rows, prefill, _MAX_TOLD_ROWS, idle_before_ns, oldest_preempted, holders)

    def _may_start(self, seq: VerifySequence, plan: _Plan) -> bool:
        """Whether a sequence without pages can start now, by a cheap check."""
        # Until this prompt is scheduled, other sequences may still extend the prefix cache or need its pages.
        has_turn = not seq.num_missing_kv or (
            plan.prefill_left > 0 and (plan.logits_left > 0 or not seq.has_pending_prompt_logprobs)
        )
        # Pages of a preempted sequence stay free for running sequences until it fits again.
        is_behind = seq.order > plan.oldest_preempted or plan.has_preempted
        if not has_turn or is_behind:
            return False
        # All that it has committed has to fit: a part would soon be preempted again.
        self._page_table.look(seq.ids, seq.num_findable, seq.found)
        return self._victims(seq, seq.found.page_ids[: seq.found.num_usable], len(seq.ids), plan) is not None

    def _start(self, seq: VerifySequence, plan: _Plan) -> bool:
        """Give it pages for all that it has committed, those found included; whether there were enough."""
        seq.page_ids = self._page_table.find(seq.ids[: seq.num_findable]) if seq.takes_pages else PageList()
        seq.kv_length = len(seq.page_ids) * self._page_table.page_size
        if not self._make_room(seq, len(seq.ids), plan):
            self.release(seq)
            return False
        self._page_table.extend(seq.page_ids, len(seq.ids) - 1)
        seq.found, seq.is_preempted = Found(), False
        seq.num_cached_tokens = seq.kv_length
        self.num_cached_tokens += seq.kv_length
        return True

    def _fit(self, seq: VerifySequence, plan: _Plan) -> Work | None:
        """As much of the sequence's work as the rows allow; None for none."""
        num_missing, rows_left = seq.num_missing_kv, plan.rows_left
        num_prefill = min(num_missing, rows_left, plan.prefill_left)
        if seq.has_pending_prompt_logprobs:
            num_prefill = min(num_prefill, max(0, seq.first_logprob_row - seq.kv_length) + plan.logits_left)
        draft_ids, parents = (seq.block.draft_ids, seq.block.parents or None) if seq.block is not None else ([], None)
        if parents is not None:
            # A tree may have more nodes than there are slots; its first nodes are a tree, and drafts may be missing.
            room = self._page_table.num_pages * self._page_table.page_size - seq.committed_length
            draft_ids, parents = draft_ids[:room], parents[:room]
        has_all = seq.has_block and not seq.awaits_draft and num_prefill == num_missing
        takes_block = has_all and num_prefill + 1 + len(draft_ids) <= rows_left
        if not takes_block and num_prefill == 0:
            return None
        end = seq.kv_length + num_prefill + (1 + len(draft_ids) if takes_block else 0)
        stop = self._page_table.stop_before(seq.page_ids, seq.kv_length, end)
        if stop < end:
            num_prefill, takes_block = stop - seq.kv_length, False
        if not takes_block:
            return Work(seq, num_prefill, takes_block, [])
        return Work(seq, num_prefill, takes_block, draft_ids, parents)

    def _make_room(self, seq: VerifySequence, length: int, plan: _Plan) -> bool:
        """Whether pages for `length` slots can be had, after preempting others if need be. Pages are taken only if that
        suffices."""
        victims = self._victims(seq, seq.page_ids, length, plan)
        if victims is None:
            return False
        while not self._page_table.can_extend(seq.page_ids, length):
            victim = victims.pop()
            self.release(victim)
            victim.is_preempted = plan.has_preempted = True
            self.num_preemptions += 1
        return True

    def _victims(
        self, seq: VerifySequence, page_ids: list[int], length: int, plan: _Plan
    ) -> list[VerifySequence] | None:
        return choose_victims(self._page_table, page_ids, length, plan.takeable(seq))
