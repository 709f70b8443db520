"""Shared part of both workers' link handlers: entries become calls on a core, results become frames.

An entry is refused by itself: its sequence is closed and answered with an error, all other entries of the frame go on.
Knows sequence ids; drafting and verifying lie elsewhere.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message
from opentelemetry.trace import Span, get_tracer

from betoken.common.errors import BetokenError, FailedPreconditionError, to_link_error
from betoken.common.names import SCOPE, SEQUENCE_ID, SPAN_SEQUENCE, WORKER_ID, WORKER_ROLE
from betoken.common.trace import context_from
from betoken.rpc.link.worker_side import LinkPeer
from betoken.rpc.servicing import internal_error, new_request_id
from betoken.v1.types_pb2 import Load, OpenSequence

SequenceKey = tuple[int, int]
"""(link id, sequence_id): sequence ids are unique within one link."""

LOAD_INTERVAL_S = 0.02
"""How often a router hears the load with its results, which changes with each: it costs more to tell than a verdict."""

Response = TypeVar("Response", bound=Message)


class SequenceCore(Protocol):
    """The methods of a worker's core that a handler needs."""

    def close(self, key: SequenceKey) -> None: ...

    def close_link(self, link_id: int) -> None: ...

    def report_load(self) -> None: ...


CoreT = TypeVar("CoreT", bound=SequenceCore)
T = TypeVar("T")
CoreCall = Callable[[CoreT], None]


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Sequences at work, sequences waiting, KV pages, since the start preemptions and tokens found in the prefix cache,
    speed and price of a row."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_preemptions: int = 0
    tokens_per_s: float = 0.0
    row_price: float = 0.0
    num_cached_tokens: int = 0

    def to_message(self) -> Load:
        return Load(
            running=self.num_running,
            waiting=self.num_waiting,
            free_pages=self.num_free_pages,
            total_pages=self.num_pages,
            preemptions=self.num_preemptions,
            tokens_per_s=self.tokens_per_s,
            row_price=self.row_price,
            cached_tokens=self.num_cached_tokens,
        )


@dataclass(slots=True)
class _Listener(Generic[Response]):
    """A router's link."""

    link: LinkPeer[Response]
    told: WorkerLoad | None = None
    """What it heard last."""
    told_ns: int | None = None
    """When results last came with the load (`time.perf_counter_ns`)."""

    def is_due(self) -> bool:
        """Whether `LOAD_INTERVAL_S` have passed since this was last true."""
        now_ns = time.perf_counter_ns()
        if self.told_ns is not None and now_ns - self.told_ns < LOAD_INTERVAL_S * 1e9:
            return False
        self.told_ns = now_ns
        return True


class LinkResults(Generic[Response]):
    """Sends frames to links by id, from any thread; what is for a link that has ended is dropped."""

    def __init__(self, response_type: type[Response]) -> None:
        self._response_type = response_type
        self._listeners: dict[int, _Listener[Response]] = {}

    def add(self, link: LinkPeer[Response]) -> None:
        self._listeners[link.id] = _Listener(link)

    def remove(self, link_id: int) -> None:
        self._listeners.pop(link_id, None)

    def send(
        self,
        field: str,
        entries: Iterable[tuple[SequenceKey, Message | int]],
        load: Callable[[], WorkerLoad] | None = None,
    ) -> None:
        """Send entries of the repeated `field`, as one frame per link, in order; with the `load` now and then."""
        frames: dict[int, Any] = {}
        for (link_id, _), entry in entries:
            frame: Any = frames.get(link_id)
            if frame is None:
                frame = frames[link_id] = self._response_type()
            getattr(frame, field).append(entry)
        for link_id, frame in frames.items():
            listener = self._listeners.get(link_id)
            if listener is not None:
                if load is not None and listener.is_due():
                    _add_load(frame, listener, load())
                listener.link.send(frame)

    def failed(self, key: SequenceKey, error: BetokenError) -> None:
        """Tell the sequence's router that it is closed, and why."""
        self.send("errors", [(key, to_link_error(error, key[1]))])

    def pending(self, keys: Iterable[SequenceKey]) -> None:
        """Tell the sequences' routers that what they wait for is still to come."""
        self.send("pending_ids", [(key, key[1]) for key in keys])

    def load_changed(self, load: WorkerLoad) -> None:
        """Tell every router that does not know it."""
        for listener in list(self._listeners.values()):
            frame: Any = self._response_type()
            if _add_load(frame, listener, load):
                listener.link.send(frame)


def _add_load(frame: Any, listener: _Listener[Response], load: WorkerLoad) -> bool:
    """Put the load into a frame, if the listener does not know it; whether that was so."""
    if listener.told == load:
        return False
    listener.told = load
    frame.load.CopyFrom(load.to_message())
    return True


class EntryHandler(Generic[CoreT, Response]):
    """Base of a worker's `LinkHandler`: a frame is handed to the model thread as one call."""

    def __init__(self, submit: Callable[[CoreCall[CoreT]], None], results: LinkResults[Response]) -> None:
        self._submit = submit
        self._results = results
        self._late: dict[SequenceKey, list[CoreCall[CoreT]]] = {}
        """What came for sequences whose open is still prepared."""

    def link_opened(self, link: LinkPeer[Any]) -> None:
        """The router hears at once how busy the worker is."""
        self._results.add(link)
        self._submit(lambda core: core.report_load())

    def link_closed(self, link: LinkPeer[Any]) -> None:
        self._results.remove(link.id)
        for key in [key for key in self._late if key[0] == link.id]:
            del self._late[key]
        self._submit(lambda core: core.close_link(link.id))

    def checked(
        self,
        link: LinkPeer[Any],
        entries: Iterable[Any],
        convert: Callable[[SequenceKey, Any], CoreCall[CoreT] | None],
    ) -> list[CoreCall[CoreT]]:
        """Entries as calls on the core. `convert` validates; what it refuses is answered here and closed. Where that
        gives None the call is `prepared`, and later entries of its sequence wait for it."""
        calls: list[CoreCall[CoreT]] = []
        for entry in entries:
            key = (link.id, entry.sequence_id)
            try:
                call = convert(key, entry)
            except BetokenError as error:
                self._results.failed(key, error)
                call = closing(key)
            except Exception as error:  # what validation has missed costs this sequence, not its link
                self._results.failed(key, internal_error(new_request_id(), error))
                call = closing(key)
            if call is not None:
                self._late.get(key, calls).append(call)
        return calls

    def prepared(self, key: SequenceKey, prepare: Callable[[], T], then: Callable[[T], CoreCall[CoreT]]) -> None:
        """Have `prepare` run on a thread, then make the call that `then` makes of it, and those that came meanwhile.

        A refusal by `prepare` is sent, and the sequence closed.
        """
        if key in self._late:
            raise FailedPreconditionError("the sequence is open already")
        late: list[CoreCall[CoreT]] = []
        self._late[key] = late

        def finish(future: asyncio.Future[T]) -> None:
            if self._late.get(key) is not late:  # its link has ended
                return
            del self._late[key]
            if (error := future.exception()) is None:
                self.run([then(future.result()), *late])
            elif isinstance(error, BetokenError):
                self._results.failed(key, error)
            else:
                self._results.failed(key, internal_error(new_request_id(), error))

        asyncio.get_running_loop().run_in_executor(None, prepare).add_done_callback(finish)

    def run(self, calls: list[CoreCall[CoreT]]) -> None:
        """Make the calls, in order, before the core's next step."""
        if calls:
            self._submit(lambda core: _call_all(core, calls))


def sequence_span(entry: OpenSequence, role: str, worker_id: str) -> Span:
    """A span for the time a sequence is open on this worker, under the request's trace; its core ends it."""
    attributes = {SEQUENCE_ID: str(entry.sequence_id), WORKER_ROLE: role, WORKER_ID: worker_id}
    return get_tracer(SCOPE).start_span(SPAN_SEQUENCE, context_from(entry.traceparent), attributes=attributes)


def closing(key: SequenceKey) -> Callable[[SequenceCore], None]:
    """The call that closes a sequence."""
    return lambda core: core.close(key)


def _call_all(core: CoreT, calls: list[CoreCall[CoreT]]) -> None:
    for call in calls:
        call(core)
