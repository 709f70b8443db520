"""The pump of one open stream, the same on both sides: a coalescing writer, a reader, and one way to end.

Frames sent during one turn of the event loop leave as one frame. Knows no handshake and no meaning of frames.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message

from betoken.common.errors import BetokenError, InvalidArgumentError, UnavailableError, from_rpc_error
from betoken.common.grpc_words import with_cause
from betoken.rpc.link.outbox import BacklogFullError, Outbox, OutboxLimits
from betoken.rpc.servicing import internal_error, new_request_id

PROTOCOL_VERSION = 1
FLUSH_TIMEOUT_S = 5.0
"""How long a normal end waits for the other side to read what is queued."""

Sent = TypeVar("Sent", bound=Message)
Received = TypeVar("Received", bound=Message)
_Queued = TypeVar("_Queued")

_EOF = cast(Any, grpc.aio).EOF  # the stubs forget it
_STATUS_WAIT_S = 0.1  # a broken write says less than the status the reader is about to see


async def read_frame(raw: Any) -> Any:
    """The next frame of a `grpc.aio` call or servicer context; None when the other side has finished.

    Raises:
        InvalidArgumentError: the bytes do not decode (gRPC raises on servers and returns None on clients).
            grpc.RpcError: the call failed (clients).
    """
    try:
        frame = await raw.read()
    except DecodeError as error:
        raise _undecodable() from error
    if frame is None:
        raise _undecodable()
    return None if frame is _EOF else frame


class FrameStream(Generic[Sent, Received]):
    """An open stream over a client call or a servicer context. Made on the event loop; sending is thread-safe."""

    def __init__(
        self, raw: Any, sent_type: type[Sent], on_frame: Callable[[Received], None], limits: OutboxLimits
    ) -> None:
        self._raw = raw
        self._on_frame = on_frame
        self._outbox = Outbox(sent_type, limits)
        self._lock = threading.Lock()  # guards _outbox and _is_closed
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[BetokenError | None] = self._loop.create_future()

    def send_entries(self, entries: Mapping[str, Iterable[Message]]) -> None:
        """Queue entries, field name -> messages. Never blocks. Dropped once the stream has ended.

        Raises:
            ResourceExhaustedError: an entry is larger than a message may be.
            UnavailableError: the other side does not read; the stream ends.
        """
        self._queue(self._outbox.add_entries, entries)

    def send_frame(self, frame: Sent) -> None:
        """Queue a whole frame, which the caller gives away. Otherwise as `send_entries`."""
        self._queue(self._outbox.add_frame, frame)

    def end(self, error: BetokenError | None = None) -> None:
        """End the stream: after what is queued has been written (None), or at once (an error). Thread-safe."""
        with self._lock:
            self._is_closed = True
        if error is None:
            self._on_loop(self._finish)
        else:
            self._on_loop(self._resolve, error)

    async def run(self) -> BetokenError | None:
        """Pump until either side ends the stream; the reason, or None for a normal end. Does not end the RPC."""
        async with asyncio.TaskGroup() as tasks:
            pumps = [tasks.create_task(self._read()), tasks.create_task(self._write())]
            try:
                return await self._ended
            finally:
                with self._lock:
                    self._is_closed = True
                for pump in pumps:
                    pump.cancel()

    async def _read(self) -> None:
        try:
            while (frame := await read_frame(self._raw)) is not None:
                self._on_frame(frame)
            self.end()
        except BetokenError as error:
            self.end(error)
        except grpc.RpcError as error:
            self.end(with_cause(from_rpc_error(error)))
        except (grpc.aio.BaseError, asyncio.InvalidStateError):
            self.end(UnavailableError("the stream broke"))
        except Exception as error:  # a fault of the frames' consumer: it costs this link only
            self.end(internal_error(new_request_id(), error))

    async def _write(self) -> None:
        try:
            while await self._wake.wait():
                self._wake.clear()
                while (frame := self._pop()) is not None:
                    await self._raw.write(frame)
                if self._is_closed:
                    self._resolve(None)
                    return
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            await asyncio.sleep(_STATUS_WAIT_S)
            self.end(UnavailableError("the stream broke"))
        except Exception as error:
            self.end(internal_error(new_request_id(), error))

    def _pop(self) -> Sent | None:
        with self._lock:
            return self._outbox.pop()

    def _queue(self, add: Callable[[_Queued], None], what: _Queued) -> None:
        must_wake = False
        try:
            with self._lock:
                if self._is_closed:
                    return
                must_wake = self._outbox.is_empty  # otherwise the writer is awake, and writes until nothing is left
                add(what)
        except BacklogFullError as full:
            error = UnavailableError(full.message)
            self.end(error)
            raise error from full
        finally:  # also when the second of two entries is refused
            if must_wake:
                self._on_loop(self._wake.set)

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        if threading.get_ident() == self._loop_thread:
            call(*args)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _finish(self) -> None:
        self._wake.set()
        self._loop.call_later(FLUSH_TIMEOUT_S, self._resolve, UnavailableError("the other side does not read"))

    def _resolve(self, error: BetokenError | None) -> None:
        if not self._ended.done():
            self._ended.set_result(error)


def _undecodable() -> InvalidArgumentError:
    return InvalidArgumentError("frame", "undecodable bytes", "must be a message of this link's type")
