"""Shared part of both workers' link handlers: entries become commands to a core, results become frames.

An entry is refused by itself: its sequence is closed and answered with an error, all other entries of the frame go on.
Knows sequence ids, not drafting or verification.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from opentelemetry.trace import Span, get_tracer

from betoken.common.errors import BetokenError, FailedPreconditionError, to_link_error
from betoken.common.names import SCOPE, SEQUENCE_ID, SPAN_SEQUENCE, WORKER_ID, WORKER_ROLE
from betoken.common.trace import context_from
from betoken.rpc.link.commands import Close, CloseLink, TableCommand, TellLoad
from betoken.rpc.link.delay_line import delayed
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.rpc.link.worker_side import LinkPeer
from betoken.rpc.servicing import internal_error, new_request_id
from betoken.v1.types_pb2 import OpenSequence

LOAD_INTERVAL_S = 0.02
"""Interval of load reports, which change with every result: a report costs more than a verification result."""

Response = TypeVar("Response", bound=Message)


CommandT = TypeVar("CommandT")
T = TypeVar("T")


@dataclass(slots=True)
class _Listener(Generic[Response]):
    """A router's link."""

    link: LinkPeer[Response]
    told: WorkerLoad | None = None
    """Last reported load."""
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

    def __init__(self, response_type: type[Response], delay_s: float = 0.0) -> None:
        """`delay_s`: time by which a simulated link delays frames."""
        self._response_type = response_type
        self._deliver = delayed(_deliver, delay_s)
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
                self._deliver(listener.link, frame)

    def failed(self, key: SequenceKey, error: BetokenError) -> None:
        """Report to the sequence's router that it is closed, with the reason."""
        self.send("errors", [(key, to_link_error(error, key[1]))])

    def pending(self, keys: Iterable[SequenceKey]) -> None:
        """Report to the sequences' routers that their results are pending."""
        self.send("pending_ids", [(key, key[1]) for key in keys])

    def load_changed(self, load: WorkerLoad) -> None:
        """Report it to every router that does not know it."""
        for listener in list(self._listeners.values()):
            frame: Any = self._response_type()
            if _add_load(frame, listener, load):
                self._deliver(listener.link, frame)


def _deliver(link: LinkPeer[Any], frame: Any) -> None:
    link.send(frame)


def _add_load(frame: Any, listener: _Listener[Response], load: WorkerLoad) -> bool:
    """Put the load into a frame, if the listener does not know it; whether that was so."""
    if listener.told == load:
        return False
    listener.told = load
    frame.load.CopyFrom(load.to_message())
    return True


class EntryHandler(Generic[CommandT, Response]):
    """Base of a worker's `LinkHandler`: a frame is handed to the model thread as one batch of commands."""

    def __init__(
        self, submit: Callable[[Sequence[CommandT | TableCommand]], None], results: LinkResults[Response]
    ) -> None:
        """`submit`: has commands applied, in order, before the core's next step."""
        self._submit = submit
        self._results = results
        self._late: dict[SequenceKey, list[CommandT | TableCommand]] = {}
        """Queued commands for sequences that are still opening."""

    def link_opened(self, link: LinkPeer[Any]) -> None:
        """The router hears at once how busy the worker is."""
        self._results.add(link)
        self._submit((TellLoad(),))

    def link_closed(self, link: LinkPeer[Any]) -> None:
        self._results.remove(link.id)
        for key in [key for key in self._late if key[0] == link.id]:
            del self._late[key]
        self._submit((CloseLink(link.id),))

    def checked(
        self,
        link: LinkPeer[Any],
        entries: Iterable[Any],
        convert: Callable[[SequenceKey, Any], CommandT | TableCommand | None],
    ) -> list[CommandT | TableCommand]:
        """Entries as commands. `convert` validates; a rejected entry is answered and closed here. If it returns None
        the command is `prepared`, and later entries of its sequence wait for it."""
        commands: list[CommandT | TableCommand] = []
        for entry in entries:
            key = (link.id, entry.sequence_id)
            command: CommandT | TableCommand | None
            try:
                command = convert(key, entry)
            except BetokenError as error:
                self._results.failed(key, error)
                command = Close(key)
            except Exception as error:  # what validation has missed costs this sequence, not its link
                self._results.failed(key, internal_error(new_request_id(), error))
                command = Close(key)
            if command is not None:
                self._late.get(key, commands).append(command)
        return commands

    def closes(self, link: LinkPeer[Any], entries: Iterable[Any]) -> list[CommandT | TableCommand]:
        """The `closes` of a frame as commands."""
        return self.checked(link, entries, lambda key, entry: Close(key))

    def prepared(self, key: SequenceKey, prepare: Callable[[], T], then: Callable[[T], CommandT]) -> None:
        """Have `prepare` run on a thread, then submit the command that `then` makes of it, and commands that arrived
        meanwhile.

        A refusal by `prepare` is sent, and the sequence closed.
        """
        if key in self._late:
            raise FailedPreconditionError("the sequence is open already")
        late: list[CommandT | TableCommand] = []
        self._late[key] = late

        def finish(future: asyncio.Future[T]) -> None:
            if self._late.get(key) is not late:  # its link has ended
                return
            del self._late[key]
            if (error := future.exception()) is None:
                self.submit([then(future.result()), *late])
            elif isinstance(error, BetokenError):
                self._results.failed(key, error)
            else:
                self._results.failed(key, internal_error(new_request_id(), error))

        asyncio.get_running_loop().run_in_executor(None, prepare).add_done_callback(finish)

    def submit(self, commands: Sequence[CommandT | TableCommand]) -> None:
        """Hand commands to the core, unless there are none."""
        if commands:
            self._submit(commands)


def sequence_span(entry: OpenSequence, role: str, worker_id: str) -> Span:
    """A span for the time a sequence is open on this worker, under the request's trace; its core ends it."""
    attributes = {SEQUENCE_ID: str(entry.sequence_id), WORKER_ROLE: role, WORKER_ID: worker_id}
    return get_tracer(SCOPE).start_span(SPAN_SEQUENCE, context_from(entry.traceparent), attributes=attributes)
