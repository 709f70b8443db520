"""The router's side of a link: dial, shake hands, pump frames, dial again with backoff and jitter, for days.

Knows its worker and the state of the link, not rounds or placement.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from betoken.common.address import UNIX_PREFIX
from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    LoadingError,
    UnavailableError,
    from_rpc_error,
)
from betoken.rpc.link.backoff import Backoff
from betoken.rpc.link.diagnosis import explain, send_refusal, state_after, status_of
from betoken.rpc.link.options import LinkCallbacks, LinkOptions, LinkState, open_channel
from betoken.rpc.link.stream import PROTOCOL_VERSION, FrameStream, read_frame
from betoken.rpc.servicing import internal_error, new_request_id
from betoken.v1 import draft_pb2_grpc, verify_pb2_grpc
from betoken.v1.draft_pb2 import DraftLinkRequest, DraftLinkResponse
from betoken.v1.types_pb2 import Drain, Load, RouterHello, WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkRequest, VerifyLinkResponse

_log = logging.getLogger(__name__)

_CHANNEL_AGE_S = 2.0
"""A failed dial gives up a channel that is older: the next one's resolves the name afresh. gRPC looks a name up again
after half a minute at the earliest, and after up to two without useful work."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class WorkerLink(Generic[Request, Response]):
    """One router's link to one worker. `run` it in a TaskGroup; `connect_once` may be awaited before that."""

    def __init__(
        self,
        address: str,
        role: str,
        stub_method: Callable[[grpc.aio.Channel], Any],
        request_type: type[Request],
        callbacks: LinkCallbacks[Response],
        options: LinkOptions | None = None,
    ) -> None:
        self.address = address
        self.role = role
        self.state = LinkState.CONNECTING
        self.hello: WorkerHello | None = None
        """The worker's handshake; the last one while it is away."""
        self.load: Load | None = None
        """The worker's last load; None while not connected."""
        self.detail = ""
        """Why the link is not ready; empty when it is."""
        self.loading: LoadingError | None = None
        """Progress of a worker that loads its model; None in other states."""
        self._request_type = request_type
        self._callbacks = callbacks
        self._options = options or LinkOptions()
        self._stub_method = stub_method
        self._channel: grpc.aio.Channel | None = None
        self._channel_since = 0.0
        self._call: Any = None
        self._stream: FrameStream[Request, Response] | None = None
        self._open_ids: set[int] = set()
        self._dialling = asyncio.Lock()
        self._is_pumping = False
        self._dial_timeout: asyncio.Timeout | None = None
        self._backoff = Backoff(self._options, is_local=address.startswith(UNIX_PREFIX))
        self._closing = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()

    @property
    def is_up(self) -> bool:
        """Whether entries can be sent."""
        return self._stream is not None

    def send(self, **entries: Iterable[Message]) -> None:
        """Queue entries by field name (`opens=`, `blocks=`, `commits=`, `requests=`, `closes=`); never blocks.

        All that is sent in one turn of the event loop leaves as one frame. The worker applies a frame's entries in the
        order opens, commits, blocks or requests, closes. Closes alone on a link that is down are dropped: the worker
        has freed the sequences already.

        Raises:
            UnavailableError: the link is not up, or the worker does not read (the link then ends).
            ResourceExhaustedError: an entry is larger than a message may be.
        """
        if self._stream is None:
            if entries.keys() == {"closes"}:
                return
            raise UnavailableError(f"{self.role} worker {self.address} is not connected: {self.detail or self.state}")
        opened = entries.get("opens", ())
        self._stream.send_entries(entries)
        for entry in opened:
            self._open_ids.add(entry.sequence_id)  # type: ignore[attr-defined]
        for entry in entries.get("closes", ()):
            self._open_ids.discard(entry.sequence_id)  # type: ignore[attr-defined]
        if self.state is LinkState.DRAINING:
            self._release_if_idle()

    async def connect_once(self) -> WorkerHello:
        """Dial and shake hands, once; at once when connected. `run` keeps the link, before or after this.

        Raises:
            BetokenError: why not; `state` and `detail` say the same.
        """
        async with self._dialling:
            if self._closing.is_set():
                raise UnavailableError(f"the link to {self.address} is closed")
            if self._stream is not None and self.hello is not None:
                return self.hello
            try:
                return await self._dial()
            except BetokenError as failure:
                error = await self._explained(failure)
                self._not_ready(state_after(error), error)
                if self.state is LinkState.CONNECTING and time.monotonic() - self._channel_since > _CHANNEL_AGE_S:
                    await self._close_channel()
                raise error from None

    async def run(self) -> None:
        """Keep the link: dial, pump frames, dial again, until `close`. Raises nothing but cancellation."""
        try:
            while not self._closing.is_set():
                try:
                    await self.connect_once()
                except BetokenError:
                    await self._pause()
                    continue
                up_since = time.monotonic()
                await self._pump()
                if time.monotonic() - up_since >= self._options.stable_s:
                    self._backoff.reset()
                else:
                    await self._pause()
        finally:
            self._closing.set()
            self._hang_up(LinkState.CLOSED, UnavailableError("the link is closed"))

    def dial_soon(self) -> None:
        """Dial a refused worker now: what it was refused for may be gone."""
        if self.state is LinkState.REFUSED:
            self._backoff.reset()
            self._backoff.wake()

    async def close(self) -> None:
        """Say goodbye, wait shortly for the worker's last frames, end. Idempotent; `run` returns."""
        self._closing.set()
        self._backoff.wake()
        if self._stream is not None and self._is_pumping:
            self._say_drain("router closes the link")
            try:
                async with asyncio.timeout(self._options.drain_timeout_s):
                    await self._down.wait()
            except TimeoutError:
                pass
        self._hang_up(LinkState.CLOSED, UnavailableError("the link is closed"))
        if self._dial_timeout is not None and not self._dial_timeout.expired():
            self._dial_timeout.reschedule(0)  # cancelling the call would not wake a write that waits for a connection
        async with self._dialling:
            pass
        await self._close_channel()

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def _dial(self) -> WorkerHello:
        if self._channel is None:
            self._channel = open_channel(self.address, self._options)
            self._channel_since = time.monotonic()
        call = self._stub_method(self._channel)()
        try:
            async with asyncio.timeout(self._options.connect_timeout_s) as self._dial_timeout:
                hello_frame: Any = self._request_type()
                hello_frame.hello.CopyFrom(
                    RouterHello(protocol_version=PROTOCOL_VERSION, router_id=self._options.router_id)
                )
                await call.write(hello_frame)
                first = await read_frame(call)
                try:
                    hello = self._accept(first)
                except BetokenError as refusal:
                    await send_refusal(call, self._drain_frame(Drain(reason=str(refusal), is_refusal=True)))
                    raise
                if self._closing.is_set():
                    raise UnavailableError("the link is closed")
        except BaseException as error:
            call.cancel()
            match error:
                case TimeoutError() if self._closing.is_set():
                    raise UnavailableError("the link is closed") from None
                case TimeoutError():
                    raise DeadlineExceededError(f"no handshake within {self._options.connect_timeout_s} s") from None
                case grpc.RpcError():
                    raise from_rpc_error(error) from None
                case grpc.aio.BaseError() | asyncio.InvalidStateError():
                    raise await status_of(call) from None
                case BetokenError():
                    raise
                case Exception():
                    raise internal_error(new_request_id(), error) from error
            raise
        finally:
            self._dial_timeout = None
        self._call = call
        self._stream = FrameStream(call, self._request_type, self._take, self._options.limits)
        self.hello, self.load, self.loading, self.state, self.detail = hello, None, None, LinkState.READY, ""
        self._down.clear()
        _log.info("%s worker %s at %s is up", self.role, hello.worker_id, self.address)
        self._callbacks.on_up()
        return hello

    async def _explained(self, failure: BetokenError) -> BetokenError:
        """Why a dial failed; `close` cuts the search short."""
        if self._channel is None or self._closing.is_set():
            return failure
        try:
            async with asyncio.timeout(self._options.connect_timeout_s) as self._dial_timeout:
                return await explain(failure, self.role, self._channel, self._stub_method(self._channel))
        except TimeoutError:
            return failure
        finally:
            self._dial_timeout = None

    def _accept(self, first: Any) -> WorkerHello:
        if first is None:
            raise UnavailableError("the worker closed the link without a hello")
        if not first.HasField("hello"):
            raise FailedPreconditionError("the worker's first frame has no hello")
        hello: WorkerHello = first.hello
        if hello.protocol_version != PROTOCOL_VERSION:
            raise FailedPreconditionError(
                f"hello.protocol_version = {hello.protocol_version}: this router speaks {PROTOCOL_VERSION}"
            )
        if hello.role != self.role:
            raise FailedPreconditionError(f'hello.role = {hello.role}: a "{self.role}" worker is expected here')
        self._callbacks.check_hello(hello)
        return hello

    async def _pump(self) -> None:
        if self._stream is None:
            return
        self._is_pumping = True
        try:
            why = await self._stream.run()
        finally:
            self._is_pumping = False
        self._hang_up(LinkState.CONNECTING, why or UnavailableError("the worker closed the link"))

    def _take(self, frame: Any) -> None:
        if frame.HasField("load"):
            self.load = frame.load
        if frame.HasField("drain") and self.state is LinkState.READY:
            self.state, self.detail = LinkState.DRAINING, frame.drain.reason
            _log.info("%s worker %s drains: %s", self.role, self.address, self.detail)
        self._callbacks.on_frame(frame)
        if self.state is LinkState.DRAINING:
            self._release_if_idle()

    def _release_if_idle(self) -> None:
        """A draining worker may go as soon as this router has nothing on it."""
        if not self._open_ids and self._stream is not None:
            self._say_drain("nothing left on this worker")

    def _say_drain(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.send_frame(self._drain_frame(Drain(reason=reason)))

    def _drain_frame(self, drain: Drain) -> Any:
        frame: Any = self._request_type()
        frame.drain.CopyFrom(drain)
        return frame

    def _hang_up(self, state: LinkState, why: BetokenError) -> None:
        stream, call = self._stream, self._call
        self._stream = self._call = None
        if call is not None:
            call.cancel()
        self._not_ready(state, why)
        if stream is not None:
            stream.end(why)
            self._open_ids.clear()
            self._down.set()
            self._callbacks.on_down(why)

    def _not_ready(self, state: LinkState, why: BetokenError | None) -> None:
        state = LinkState.CLOSED if self._closing.is_set() else state
        before, self.loading = self.loading, why if isinstance(why, LoadingError) else None
        detail = self.loading.stage if self.loading else str(why) if why else state
        if self.loading is not None:
            if before is None or before.stage != self.loading.stage:
                _log.info("%s worker %s is loading: %s", self.role, self.address, self.loading.stage)
        elif (state, detail) != (self.state, self.detail) and state is not LinkState.CLOSED:
            _log.warning("%s worker %s is %s: %s", self.role, self.address, state, detail)
        self.state, self.detail, self.load = state, detail, None
        if self.loading is not None and before is None:
            self._callbacks.on_loading()

    async def _pause(self) -> None:
        if not self._closing.is_set():
            refused_by = self._channel if self.state is LinkState.REFUSED else None
            await self._backoff.pause(refused_by, is_loading=self.loading is not None)


class VerifyLink(WorkerLink[VerifyLinkRequest, VerifyLinkResponse]):
    """A link to a verify worker."""

    def __init__(
        self, address: str, callbacks: LinkCallbacks[VerifyLinkResponse], options: LinkOptions | None = None
    ) -> None:
        super().__init__(
            address,
            "verify",
            lambda channel: verify_pb2_grpc.VerifyServiceStub(channel).Link,
            VerifyLinkRequest,
            callbacks,
            options,
        )


class DraftLink(WorkerLink[DraftLinkRequest, DraftLinkResponse]):
    """A link to a draft worker."""

    def __init__(
        self, address: str, callbacks: LinkCallbacks[DraftLinkResponse], options: LinkOptions | None = None
    ) -> None:
        super().__init__(
            address,
            "draft",
            lambda channel: draft_pb2_grpc.DraftServiceStub(channel).Link,
            DraftLinkRequest,
            callbacks,
            options,
        )
