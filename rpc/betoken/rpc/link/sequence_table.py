"""The open sequences of a worker: taken in or refused, found, ended by close, deadline, fault or the end of their link.

Kept by a core on the model thread. Knows keys, deadlines, spans and limits, not drafting or verification.
"""

import time
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Generic, Protocol, TypeVar

from opentelemetry.trace import Span

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    ResourceExhaustedError,
)
from betoken.common.trace import fail, status_of
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.commands import Close, CloseLink, TableCommand, TellLoad
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.rpc.servicing import internal_error, new_request_id

PENDING_INTERVAL_S = 0.1
"""Time after which a pending result is reported to its router, and the interval of these reports."""


class Opening(Protocol):
    """A worker's command to open a sequence, as its table sees it."""

    @property
    def key(self) -> SequenceKey: ...

    @property
    def span(self) -> Span:
        """Ends when the sequence does."""
        ...


class KeptSequence(Opening, Protocol):
    """A worker's sequence, as its table sees it."""

    @property
    def deadline_s(self) -> float | None:
        """Deadline, seconds of `time.monotonic`; None = none."""
        ...

    @property
    def pending_since_ns(self) -> int | None:
        """Since when its router waits for an answer, `time.perf_counter_ns`; None while it does not."""
        ...


class TableSink(Protocol):
    """Receiver of a table's events; called on the model thread."""

    def pending(self, keys: list[SequenceKey]) -> None:
        """Answers of these sequences are still to come."""
        ...

    def failed(self, key: SequenceKey, error: BetokenError) -> None:
        """The sequence is closed for this reason."""
        ...

    def load_changed(self, load: WorkerLoad) -> None:
        """Sequences went without an answer."""
        ...


KeptT = TypeVar("KeptT", bound=KeptSequence)
OpeningT = TypeVar("OpeningT", bound=Opening)
_OpeningIn = TypeVar("_OpeningIn", bound=Opening, contravariant=True)


class SequenceOwner(Protocol[_OpeningIn, KeptT]):
    """The core whose table it is."""

    def take_in(self, opening: _OpeningIn) -> KeptT:
        """Make a sequence and room for it. Raises a `BetokenError` that refuses it."""
        ...

    def let_go(self, sequence: KeptT) -> None:
        """Free what is held for a sequence that has just left the table; must not raise."""
        ...

    def load(self) -> WorkerLoad:
        """How busy the worker is."""
        ...


class SequenceTable(Mapping[SequenceKey, KeptT], Generic[OpeningT, KeptT]):
    """Open sequences by key, in the order they were opened."""

    def __init__(
        self,
        owner: SequenceOwner[OpeningT, KeptT],
        sink: TableSink,
        max_sequences: int,
        fast_wake: FastWake | None = None,
    ) -> None:
        """`fast_wake`: held while a sequence is open."""
        self._owner = owner
        self._sink = sink
        self._max_sequences = max_sequences
        self._fast_wake = fast_wake or FastWake()
        self._open: dict[SequenceKey, KeptT] = {}
        self._told_pending_ns = 0
        self.num_opened = 0
        """Sequences taken in since the start."""

    def __getitem__(self, key: SequenceKey) -> KeptT:
        return self._open[key]

    def __iter__(self) -> Iterator[SequenceKey]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def values(self) -> ValuesView[KeptT]:
        return self._open.values()

    def items(self) -> ItemsView[SequenceKey, KeptT]:
        return self._open.items()

    def apply(self, command: TableCommand) -> None:
        """Apply a command that every worker's core supports."""
        match command:
            case Close(key):
                self.close(key)
            case CloseLink(link_id):
                for key in [key for key in self._open if key[0] == link_id]:
                    self.close(key)
            case TellLoad():
                self._report_load()

    def open(self, opening: OpeningT) -> None:
        """Take a sequence in, or refuse it. A second open of one closes the first too."""
        try:
            if opening.key in self._open:
                self.close(opening.key)
                raise FailedPreconditionError("the sequence is open already")
            if len(self._open) >= self._max_sequences:
                raise ResourceExhaustedError(f"{self._max_sequences} sequences are open, the most this worker holds")
            sequence = self._owner.take_in(opening)
        except BetokenError as error:
            self._refuse(opening, error)
        except Exception as error:  # what validation has missed costs this sequence only
            self._refuse(opening, internal_error(new_request_id(), error))
        else:
            self._open[opening.key] = sequence
            self.num_opened += 1
            self._fast_wake.hold()
            self._report_load()  # or other routers would think there was room

    def find(self, key: SequenceKey) -> KeptT | None:
        """The sequence; None if it is not open, which is reported to its router."""
        sequence = self._open.get(key)
        if sequence is None:
            self._sink.failed(key, NotFoundError("the sequence is not open"))
        return sequence

    def close(self, key: SequenceKey) -> None:
        """Forget a sequence and free what is held for it; unknown keys are ignored."""
        sequence = self._open.pop(key, None)
        if sequence is not None:
            self._fast_wake.release()
            self._owner.let_go(sequence)
            sequence.span.end()
            self._report_load()

    def fail(self, key: SequenceKey, error: BetokenError) -> None:
        """Close an open sequence for this reason."""
        fail(self._open[key].span, status_of(error))
        self.close(key)
        self._sink.failed(key, error)

    def expire(self, now_s: float) -> float | None:
        """Close what is past its deadline; return the next deadline (`time.monotonic`), None without one."""
        deadlines = [(seq.deadline_s, key) for key, seq in self._open.items() if seq.deadline_s is not None]
        for deadline_s, key in deadlines:
            if deadline_s <= now_s:
                self.fail(key, DeadlineExceededError("the request's deadline passed"))
        return min((deadline_s for deadline_s, _ in deadlines if deadline_s > now_s), default=None)

    def report_pending(self) -> None:
        """Name, some times a second, what has waited for long: so routers know a long wait from a worker that hangs."""
        now_ns = time.perf_counter_ns()
        before_ns = now_ns - round(PENDING_INTERVAL_S * 1e9)
        if self._told_pending_ns <= before_ns:
            self._told_pending_ns = now_ns
            waiting = [(key, seq.pending_since_ns) for key, seq in self._open.items()]
            if keys := [key for key, since_ns in waiting if since_ns is not None and since_ns <= before_ns]:
                self._sink.pending(keys)

    def check_integrity(self) -> None:
        """Re-derive from the open sequences what is held for them; raises when it is off."""
        assert self._fast_wake.num_held == len(self._open), "cores are kept awake for what is not open"

    def _refuse(self, opening: OpeningT, error: BetokenError) -> None:
        fail(opening.span, status_of(error))
        opening.span.end()
        self._sink.failed(opening.key, error)

    def _report_load(self) -> None:
        self._sink.load_changed(self._owner.load())
