"""The verify worker's core: open sequences, the work waiting for them, one forward after another.

Runs on the model thread. It knows no protobuf and no streams: results leave through a `VerifySink`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from betoken.common.economy.row_price import RowPrice
from betoken.common.errors import (
    BetokenError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
)
from betoken.common.names import NUM_ACCEPTED, NUM_DRAFT_TOKENS
from betoken.drafters.drafter import memory_counts
from betoken.engine.bring_up.step_costs import StepCost
from betoken.engine.errors import RankLostError
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler.verification import VerificationMode
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.sequence_table import SequenceTable, TableSink
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.verify_worker.attached import AttachedDrafters
from betoken.verify_worker.commands import PLAIN, Grant, Open, Verify, VerifyCommand
from betoken.verify_worker.gathering import Gathering
from betoken.verify_worker.prompt_logprobs import PromptPart
from betoken.verify_worker.scheduler import Scheduler, Work
from betoken.verify_worker.sequence import Block, Decision, VerifySequence
from betoken.verify_worker.verify import BegunStep, begin_step, finish_step

logger = logging.getLogger(__name__)


class VerifySink(TableSink, Protocol):
    """Where results go; called on the model thread."""

    def decided(self, decisions: list[Decision], load: Callable[[], WorkerLoad]) -> None:
        """Decisions of one forward, in commit order per sequence; `load` gives how busy the worker is."""
        ...

    def send_prompt_logprobs(self, parts: Sequence[PromptPart]) -> None:
        """Logprobs of prompts, in order per sequence and before its decisions."""
        ...

    def stale(self, key: SequenceKey, length: int) -> None:
        """A drafted block had another base than the committed length."""
        ...


class VerifyCore:
    """Continuous batching over all open sequences of all links."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        sink: VerifySink,
        max_sequences: int,
        step_costs: Sequence[StepCost] = (),
        fast_wake: FastWake | None = None,
        attached: AttachedDrafters | None = None,
    ) -> None:
        """`step_costs`: measured durations; without any, rows have no price. `fast_wake`: held while a sequence is
        open."""
        self._attached = attached or AttachedDrafters({})
        self._runner = runner
        self._price = RowPrice(step_costs)
        self._gathering = Gathering(self._price.step_ns) if len(step_costs) > 1 else None
        self._scheduler = scheduler
        self._sink = sink
        self._sequences: SequenceTable[Open, VerifySequence] = SequenceTable(self, sink, max_sequences, fast_wake)
        self._in_flight: deque[BegunStep] = deque()
        """Forwards under way, oldest first, of distinct sequences."""
        self._stepped_ns = 0
        """When the last forward's decisions were handed out: `time.perf_counter_ns`."""
        self._retry_at_s: float | None = None
        """When to plan again (`time.monotonic`) if nothing happens before: all that waits wants pages of idle ones."""

    @property
    def has_work(self) -> bool:
        is_wanted = self._retry_at_s is None and any(seq.wants_forward for seq in self._sequences.values())
        return is_wanted or bool(self._in_flight) or self._attached.has_work

    def apply(self, command: VerifyCommand) -> None:
        """Apply a command. A fault of its sequence closes the sequence and is reported."""
        self._retry_at_s = None
        match command:
            case Verify():
                self._verify(command)
            case Grant():
                self._grant(command)
            case Open():
                self._sequences.open(command)
            case _:
                self._sequences.apply(command)

    def take_in(self, opening: Open) -> VerifySequence:
        """A sequence in the order of opening, with its attached drafter.

        Raises:
            InvalidArgumentError: all pages cannot hold it, or its attached drafter refuses it.
        """
        sequence = VerifySequence(opening, self._sequences.num_opened)
        table = self._runner.page_table
        if table.num_pages_for(sequence.max_length) > table.num_pages:
            limit = f"must be at most {table.num_pages * table.page_size} tokens, all the KV pages there are"
            raise InvalidArgumentError("open.max_length", sequence.max_length, limit)
        if sequence.drafter:
            self._attached.open(sequence)
        if not self._sequences:
            self._price.resume(time.perf_counter())
        return sequence

    def let_go(self, sequence: VerifySequence) -> None:
        """Free the pages of a sequence that is closed."""
        self._retry_at_s, sequence.is_closed = None, True
        self._attached.close(sequence)
        self._scheduler.release(sequence)
        counts = {NUM_DRAFT_TOKENS: sequence.num_draft_tokens, NUM_ACCEPTED: sequence.num_accepted}
        sequence.span.set_attributes(counts)

    def expire(self, now_s: float) -> float | None:
        """Close what is past its deadline; return when to call again (`time.monotonic`), None without a time."""
        times_s = [self._sequences.expire(now_s)]
        if self._retry_at_s is not None and self._retry_at_s <= now_s:
            self._retry_at_s = None
        times_s.append(self._retry_at_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def step(self) -> None:
        """Draft, schedule, begin one forward, and finish the oldest one unless another may be begun before. A failing
        forward ends the sequences that were in it."""
        is_begun = self._begin()
        if self._in_flight and not (is_begun and len(self._in_flight) < self._runner.max_in_flight):
            self._finish()

    def _begin(self) -> bool:
        """Begin a forward if there is something to run now."""
        if self._attached.has_sequences:
            self._attached.propose(self._price.price)
        if self._gathering is not None and (wait_ns := self._wait_ns(self._gathering)):
            self._retry_at_s = time.monotonic() + wait_ns * 1e-9
            return False
        planned = self._scheduler.plan(self._sequences.values(), self._runner.max_in_flight)
        if not planned:
            if not self._in_flight and not self._attached.has_work:  # no round waits for its draft
                self._retry_at_s = time.monotonic() + self._scheduler.idle_grace_s
            return False
        try:
            self._in_flight.append(begin_step(self._runner, planned))
        except RankLostError:
            raise  # no later forward can succeed; sequences go on at other workers
        except Exception:
            self._forward_failed(planned)
            return False
        return True

    def _finish(self) -> None:
        """Finish the oldest forward and hand out its decisions."""
        step = self._in_flight.popleft()
        try:
            decisions, committed, prompt_parts = finish_step(self._runner, step)
        except RankLostError:
            raise
        except Exception:
            self._forward_failed(step.planned)
            return
        planned = [work for work in step.planned if not work.sequence.is_closed]
        decided = {decision.key: decision.base_length for decision in decisions}
        for work in planned:
            if (base_length := decided.get(work.sequence.key)) is not None:
                self._after_block(work.sequence, base_length)
            elif work.takes_block:
                self._sequences.fail(work.sequence.key, _no_token(work.sequence))
            elif not work.sequence.wants_forward:  # its prompt is computed, before its first block is here
                work.sequence.idle_since_ns = time.perf_counter_ns()
        self._send_prompt_logprobs(prompt_parts)
        self._sink.decided(decisions, self.load)
        self._attached.observe(committed)
        self._stepped_ns = time.perf_counter_ns()
        self._learn(planned, decisions)
        self._sequences.report_pending()

    def _forward_failed(self, planned: Sequence[Work]) -> None:
        logger.exception("a forward over %d sequences failed", len(planned))
        for work in planned:
            if not work.sequence.is_closed:
                self._sequences.fail(work.sequence.key, InternalError("the forward failed"))

    def _send_prompt_logprobs(self, parts: Sequence[PromptPart]) -> None:
        for part in parts:
            if not part.is_sound and part.key in self._sequences:
                self._sequences.fail(part.key, InternalError("the target's logits are not finite"))
        if told := [part for part in parts if part.key in self._sequences]:
            self._sink.send_prompt_logprobs(told)

    def _wait_ns(self, gathering: Gathering) -> float:
        """How long the next forward waits for blocks that are about to come."""
        now_ns = time.perf_counter_ns()
        sequences = self._sequences.values()
        since_sent_ns = [
            now_ns - seq.idle_since_ns for seq in sequences if seq.is_between_blocks and not seq.is_finished
        ]
        if not since_sent_ns:
            return 0.0
        num_ready, num_rows = self._scheduler.ready(sequences)
        room = self._scheduler.max_rows - num_rows
        return gathering.wait_ns(now_ns - self._stepped_ns, num_ready, num_rows, room, since_sent_ns)

    def check_integrity(self) -> None:
        """Re-derive from the open sequences what is held for them; raises when it is off."""
        self._attached.check_integrity()
        self._runner.page_table.check_integrity(seq.page_ids for seq in self._sequences.values())
        self._sequences.check_integrity()

    def _verify(self, command: Verify) -> None:
        """Queue a draft block for the next forward."""
        key, block = command.key, Block(command.draft_ids, command.parents, command.draft_probs)
        seq = self._landed(key)
        if seq is None:
            return
        room = seq.max_length - command.base_length - 1
        if seq.block is not None and seq.attached_round is None:
            self._sequences.fail(key, FailedPreconditionError("a block of this sequence is still unanswered"))
        elif (error := _refusal_in_mode(block, seq.mode)) is not None:
            self._sequences.fail(key, error)
        elif command.base_length != seq.committed_length:
            seq.plain_until, seq.rounds = 0, PLAIN
            self._sink.stale(key, seq.committed_length)
        elif block.depth > room:
            limit = f"must be at most {room} ids deep, what fits before max_length"
            self._sequences.fail(key, InvalidArgumentError("block.draft_ids", f"{block.depth} ids", limit))
        else:
            self._arrived(seq, command.arrived_ns, 1 + len(block.draft_ids))
            seq.ask(command.arrived_ns)
            if seq.rules.has_grammar and not block.draft_probs:  # else what a draft was drawn from would be another
                block.keep(seq.rules.allowed_nodes(block.draft_ids, block.parents or None))
            seq.block, seq.attached_round, seq.rounds = block, None, PLAIN
            seq.plain_until = command.base_length + 1 + command.num_plain_steps if command.num_plain_steps else 0

    def _landed(self, key: SequenceKey) -> VerifySequence | None:
        """The open sequence, after a forward under way over it."""
        while (seq := self._sequences.find(key)) is not None and seq.is_in_flight:
            self._finish()
        return seq

    def _grant(self, command: Grant) -> None:
        """Extend a grant of plain steps or rounds."""
        seq = self._landed(command.key) if command.drafter else self._sequences.find(command.key)
        if seq is None:
            return
        error = self._attached.refusal(seq, command)
        if error is not None:
            self._sequences.fail(seq.key, error)
        elif command.base_length > seq.committed_length:
            self._sink.stale(seq.key, seq.committed_length)
        elif not seq.is_finished:
            if command.drafter not in ("", seq.drafter):
                self._attached.change(seq, command.drafter)
            if not seq.has_block:
                self._arrived(seq, command.arrived_ns, 1)
                seq.ask(max(seq.opened.opened_ns, time.perf_counter_ns()))
            until = min(command.base_length + command.num_tokens, seq.max_length)
            seq.plain_until, seq.rounds = max(seq.plain_until, until), command.rounds

    def _arrived(self, seq: VerifySequence, arrived_ns: int, num_rows: int) -> None:
        if self._gathering is not None and seq.is_between_blocks:
            self._gathering.add_block(arrived_ns - seq.idle_since_ns, num_rows)

    def _after_block(self, seq: VerifySequence, base_length: int) -> None:
        seq.block = None
        self._attached.commit(seq, seq.ids[base_length:])
        seq.queued_ns = seq.idle_since_ns = time.perf_counter_ns()
        if seq.is_finished:
            seq.plain_until = 0

    def _learn(self, planned: Sequence[Work], decisions: Sequence[Decision]) -> None:
        if decisions and all(work.takes_block and not work.num_prefill for work in planned):
            self._price.add_forward(sum(work.num_rows for work in planned), len(planned), decisions[0].forward_ns)
        self._price.add_tokens(sum(decision.num_kept for decision in decisions), time.perf_counter())

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        table = self._runner.page_table
        num_waiting = sum(seq.wants_forward and not seq.page_ids for seq in self._sequences.values())
        num_running = len(self._sequences) - num_waiting
        return WorkerLoad(
            num_running,
            num_waiting,
            table.num_free,
            table.num_pages,
            self._scheduler.num_preemptions,
            tokens_per_s=float(f"{self._price.tokens_per_s:.1e}"),  # routers hear of changes; not of every digit
            row_price=round(self._price.price, 2),
            num_cached_tokens=self._scheduler.num_cached_tokens,
            snapshot_bytes=len(table.snapshots) * self._runner.snapshot_bytes if table.snapshots is not None else 0,
            step_time_ratio=float(f"{self._price.step_time_ratio:.1e}"),
            memory=memory_counts(self._attached.host.drafters),
        )


def _no_token(seq: VerifySequence) -> BetokenError:
    """Why there is none after what is committed."""
    if seq.rules.is_inconsistent:
        return InternalError(f"the constraint's grammar and its mask differ after {len(seq.output_ids)} tokens")
    if seq.rules.fault:
        return InvalidArgumentError("constraint", f"{len(seq.output_ids)} tokens on", seq.rules.fault)
    return InternalError("the target's logits are not finite: they choose no token")


def _refusal_in_mode(block: Block, mode: VerificationMode) -> InvalidArgumentError | None:
    """Why a sequence of this mode cannot take the block; None if it can."""
    limit = f"must be absent in the mode {mode.name}"
    if block.parents and mode is VerificationMode.REJECTION:
        return InvalidArgumentError("block.parents", f"{len(block.parents)} entries", limit)
    if block.draft_probs and mode is not VerificationMode.REJECTION:
        return InvalidArgumentError("block.draft_probs", f"{len(block.draft_probs)} entries", limit)
    return None
