"""The draft worker's core: open sequences, each with its drafter, and the requests waiting for drafts.

Runs on the model thread. It knows no protobuf and no streams: results leave through a `DraftSink`.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.common.trace import fail, status_of
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence, DraftTerms
from betoken.engine.page_table import PageTable
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.worker_entries import PendingReport, SequenceKey, WorkerLoad

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftAnswer:
    """A finished draft block of one sequence."""

    key: SequenceKey
    base_length: int
    drafted: Drafted
    drafter_name: str
    """Name of the drafter that was asked."""
    queue_ns: int
    forward_ns: int


@dataclass(slots=True)
class _Open:
    """An open sequence and its unanswered request."""

    sequence: DraftSequence
    drafter_name: str
    requested_ns: int | None = None
    started_ns: int = 0


class DraftSink(Protocol):
    """Where results go; called on the model thread."""

    def drafted(self, answers: list[DraftAnswer], load: Callable[[], WorkerLoad]) -> None:
        """Drafts that became complete; `load` gives how busy the worker is."""
        ...

    def pending(self, keys: list[SequenceKey]) -> None:
        """Drafts of these sequences are still to come."""
        ...

    def failed(self, key: SequenceKey, error: BetokenError) -> None:
        """The sequence is closed for this reason."""
        ...

    def load_changed(self, load: WorkerLoad) -> None:
        """Sequences went without a draft."""
        ...


class DraftCore:
    """Hosts drafters by name; the first is the default."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        page_tables: Sequence[PageTable],
        sink: DraftSink,
        max_sequences: int,
        fast_wake: FastWake | None = None,
    ) -> None:
        """`fast_wake`: held while a sequence is open."""
        self._drafters = dict(drafters)
        self._default_drafter = next(iter(self._drafters))
        self._page_tables = page_tables
        self._sink = sink
        self._max_sequences = max_sequences
        self._fast_wake = fast_wake or FastWake()
        self._pending = PendingReport(sink.pending)
        self._sequences: dict[SequenceKey, _Open] = {}

    @property
    def has_work(self) -> bool:
        return any(self._has_work(name) for name in self._drafters)

    def open(self, sequence: DraftSequence, drafter_name: str) -> None:
        """Take a sequence in for a drafter; "" is the default one."""
        name = drafter_name or self._default_drafter
        try:
            if sequence.key in self._sequences:
                self.close(sequence.key)
                raise FailedPreconditionError("the sequence is open already")
            if len(self._sequences) >= self._max_sequences:
                raise ResourceExhaustedError(f"{self._max_sequences} sequences are open, the most this worker holds")
            if name not in self._drafters:
                raise InvalidArgumentError("drafter.name", name, "must be one of " + ", ".join(self._drafters))
            self._drafters[name].open(sequence)
        except BetokenError as error:
            self._refuse(sequence, error)
            return
        except Exception:
            logger.exception("drafter %s failed", name)
            self._refuse(sequence, InternalError("the drafter failed"))
            return
        self._sequences[sequence.key] = _Open(sequence, name)
        self._fast_wake.hold()
        self.report_load()  # or other routers would think there was room

    def commit(self, key: SequenceKey, base_length: int, ids: list[int]) -> None:
        """Append decided ids."""
        entry = self._sequences.get(key)
        if entry is None:
            return  # its error is on the way to the router
        seq = entry.sequence
        if base_length != len(seq.ids):
            message = f"commit.base_length = {base_length}: the committed length here is {len(seq.ids)}"
            self._fail(key, FailedPreconditionError(message))
        elif entry.requested_ns is not None:
            self._fail(key, FailedPreconditionError("a request of this sequence is still unanswered"))
        elif len(seq.ids) + len(ids) > seq.max_length:
            self._fail(key, InvalidArgumentError("commit.ids", f"{len(ids)} ids", f"max_length is {seq.max_length}"))
        else:
            seq.ids.extend(ids)
            seq.output_ids.extend(ids)
            if seq.rules is not None:
                seq.rules.commit(ids)
            try:
                self._drafters[entry.drafter_name].commit(seq, ids)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)
                self._restart(entry)

    def request(
        self,
        key: SequenceKey,
        num_tokens: int,
        arrived_ns: int,
        takes_trees: bool = False,
        terms: DraftTerms | None = None,
    ) -> None:
        """Ask the sequence's drafter for a block."""
        entry = self._sequences.get(key)
        if entry is None:
            self._sink.failed(key, NotFoundError("the sequence is not open"))
        elif entry.requested_ns is not None:
            self._fail(key, FailedPreconditionError("a request of this sequence is still unanswered"))
        else:
            entry.requested_ns = arrived_ns
            entry.started_ns = time.perf_counter_ns()
            entry.sequence.is_waiting, entry.sequence.takes_trees = True, takes_trees
            # A length that follows the clock would make the tokens depend on it.
            entry.sequence.terms = None if entry.sequence.steers_tokens else terms
            try:
                self._drafters[entry.drafter_name].request(entry.sequence, num_tokens)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)
                self._hand_out(self._abandon([entry]))

    def close(self, key: SequenceKey) -> None:
        """Forget a sequence and free what its drafter holds; unknown keys are ignored."""
        entry = self._sequences.pop(key, None)
        if entry is not None:
            self._fast_wake.release()
            try:
                self._drafters[entry.drafter_name].close(entry.sequence)
            except Exception:
                logger.exception("drafter %s failed", entry.drafter_name)
            entry.sequence.span.end()
            self.report_load()

    def close_link(self, link_id: int) -> None:
        """Forget every sequence of a link."""
        for key in [key for key in self._sequences if key[0] == link_id]:
            self.close(key)

    def report_load(self) -> None:
        """Tell the sink how busy the worker is."""
        self._sink.load_changed(self._load())

    def expire(self, now_s: float) -> float | None:
        """Close what is past its deadline; return the next deadline (`time.monotonic`), None without one."""
        deadlines = [
            (entry.sequence.deadline_s, key)
            for key, entry in self._sequences.items()
            if entry.sequence.deadline_s is not None
        ]
        for deadline_s, key in deadlines:
            if deadline_s <= now_s:
                self._fail(key, DeadlineExceededError("the request's deadline passed"))
        return min((deadline_s for deadline_s, _ in deadlines if deadline_s > now_s), default=None)

    def step(self) -> None:
        """Let every drafter with work do one unit of it, and hand out what became complete."""
        for name, drafter in self._drafters.items():
            if not self._has_work(name):
                continue
            # Asked before the step: one that fails may forget what it had to do.
            idle = {other for other in self._drafters if not self._has_work(other)}
            try:
                # A list, whatever a plug-in makes of it.
                finished = self._checked(list(drafter.step()), name) if drafter.has_work else []
            except Exception:
                # A drafter that fails costs its sequences this round's drafts, never their streams: those of its own,
                # and those of drafters that had nothing to do themselves and left it to others.
                logger.exception("drafter %s failed", name)
                waiting = [entry for entry in self._sequences.values() if entry.requested_ns is not None]
                finished = self._abandon([entry for entry in waiting if entry.drafter_name in {name, *idle}])
            self._hand_out(finished)
        self._pending.after_step(
            (key, entry.requested_ns) for key, entry in self._sequences.items() if entry.requested_ns is not None
        )

    def check_integrity(self) -> None:
        """Re-derive what is held for open sequences; raises when it is off."""
        for drafter in self._drafters.values():
            drafter.check_integrity()
        assert self._fast_wake.num_held == len(self._sequences), "cores are kept awake for what is not open"

    def _has_work(self, name: str) -> bool:
        """Whether a drafter has something to do; one that cannot tell has if a sequence waits for it: `step` fails."""
        try:
            return bool(self._drafters[name].has_work)
        except Exception:
            entries = self._sequences.values()
            return any(entry.drafter_name == name and entry.requested_ns is not None for entry in entries)

    def _checked(self, finished: list[Drafted], name: str) -> list[Drafted]:
        """The drafts of a step; where one is none, its sequence is taken in afresh."""
        waiting = {key for key, entry in self._sequences.items() if entry.requested_ns is not None}
        checked = []
        for drafted in finished:
            key = drafted.sequence.key
            if key not in waiting:
                raise ValueError("a draft that nobody asked for")
            waiting.remove(key)
            try:
                drafted.check()
            except Exception:
                logger.exception("drafter %s failed", name)
                checked += self._abandon([self._sequences[key]])
            else:
                checked.append(drafted)
        return checked

    def _abandon(self, entries: list[_Open]) -> list[Drafted]:
        """Take waiting sequences in afresh, each answered with an empty draft."""
        return [Drafted(entry.sequence, []) for entry in entries if self._restart(entry)]

    def _restart(self, entry: _Open) -> bool:
        """Whether the drafter, after a fault, took the sequence in again; otherwise it is closed."""
        drafter = self._drafters[entry.drafter_name]
        try:
            drafter.close(entry.sequence)
            drafter.open(entry.sequence)
        except Exception:
            logger.exception("drafter %s cannot take its sequence again", entry.drafter_name)
            del self._sequences[entry.sequence.key]
            self._fast_wake.release()
            self._refuse(entry.sequence, InternalError("the drafter failed"))
            return False
        return True

    def _hand_out(self, finished: list[Drafted]) -> None:
        if finished:
            self._sink.drafted([self._answer(drafted) for drafted in finished], self._load)

    def _answer(self, drafted: Drafted) -> DraftAnswer:
        seq = drafted.sequence
        entry = self._sequences[seq.key]
        assert entry.requested_ns is not None, "a drafter answered a request nobody made"
        now_ns = time.perf_counter_ns()
        answer = DraftAnswer(
            key=seq.key,
            base_length=len(seq.ids),
            drafted=drafted,
            drafter_name=entry.drafter_name,
            queue_ns=max(0, entry.started_ns - entry.requested_ns),
            forward_ns=now_ns - entry.started_ns,
        )
        entry.requested_ns, entry.sequence.is_waiting = None, False
        return answer

    def _refuse(self, sequence: DraftSequence, error: BetokenError) -> None:
        """Turn away a sequence that was not taken in, or not again."""
        fail(sequence.span, status_of(error))
        sequence.span.end()
        self._sink.failed(sequence.key, error)

    def _fail(self, key: SequenceKey, error: BetokenError) -> None:
        fail(self._sequences[key].sequence.span, status_of(error))
        self.close(key)
        self._sink.failed(key, error)

    def _load(self) -> WorkerLoad:
        num_free = sum(table.num_free for table in self._page_tables)
        num_pages = sum(table.num_pages for table in self._page_tables)
        return WorkerLoad(len(self._sequences), 0, num_free, num_pages)
