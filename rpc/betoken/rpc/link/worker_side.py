"""The worker's side of links: handshake with each router, frames to a handler, frames of any thread back.

A fault of one link (garbage, wrong version, a router that does not read) ends that link with a typed status, never the
server nor another link. Knows no models and no sequences.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from betoken.rpc.link.outbox import OutboxLimits
from betoken.rpc.link.stream import PROTOCOL_VERSION, FrameStream, read_frame
from betoken.rpc.servicing import typed_errors
from betoken.v1.types_pb2 import Drain, WorkerHello

_log = logging.getLogger(__name__)

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)
_RequestIn = TypeVar("_RequestIn", bound=Message, contravariant=True)

MAX_ROUTER_ID_BYTES = 128
_ACCEPTED_S = 5.0
"""A router that has refused this worker, and has not again for so long, has taken it."""
_MAX_REFUSALS = 256  # remembered; routers are called as they like
_STATUS_FLUSH_S = 0.5  # how long a drained server waits for the last statuses to leave


class LinkPeer(Generic[Response]):
    """One connected router, as a worker sees it."""

    def __init__(self, peer_id: int, name: str, address: str, stream: FrameStream[Response, Any]) -> None:
        self.id = peer_id
        """Unique in this process; never reused."""
        self.name = name
        """The router's own name."""
        self.address = address
        """Address of the peer."""
        self.refusal: str | None = None
        """Why the router refuses this worker, if it does."""
        self._stream = stream

    def send(self, frame: Response) -> None:
        """Queue a frame, which the caller gives away. Thread-safe, never blocks; dropped once the link has ended.

        Frames of one event-loop turn leave as one. A router that does not read loses its link.
        """
        try:
            self._stream.send_frame(frame)
        except UnavailableError as error:
            _log.warning("link %d to router %s ends: %s", self.id, self.name, error)
        except ResourceExhaustedError as error:
            self.end(error)

    def end(self, error: BetokenError | None = None) -> None:
        """End the link: after what is queued (None), or at once with the status of `error`. Thread-safe."""
        self._stream.end(error)


class LinkHandler(Protocol[_RequestIn]):
    """A worker's side of its links. All calls come on the event loop, in order, and must not block."""

    def link_opened(self, link: LinkPeer[Any]) -> None:
        """The handshake is done; `link.send` works."""

    def frame(self, link: LinkPeer[Any], request: _RequestIn) -> None:
        """One frame of entries. A `BetokenError` raised here ends this link with its status."""

    def link_closed(self, link: LinkPeer[Any]) -> None:
        """The link is gone, for whatever reason: free all its sequences. Once per `link_opened`."""


class LinkServicer(Generic[Request, Response]):
    """The servicer of `VerifyService` or `DraftService`: pass it to the generated `add_…Servicer_to_server`."""

    def __init__(
        self,
        hello: Callable[[], WorkerHello],
        handler: LinkHandler[Request],
        response_type: type[Response],
        *,
        max_links: int = 64,
        handshake_timeout_s: float = 10.0,
        limits: OutboxLimits | None = None,
    ) -> None:
        self._hello = hello
        self._handler = handler
        self._response_type = response_type
        self._max_links = max_links
        self._handshake_timeout_s = handshake_timeout_s
        self._limits = limits or OutboxLimits()
        self._ids = itertools.count(1)
        self._peers: dict[int, LinkPeer[Response]] = {}
        self._refusals: dict[tuple[str, str], str] = {}
        """Last reasons of routers that refuse this worker, by name and host; each is logged once."""
        self._all_closed = asyncio.Event()
        self._drain_reason: str | None = None

    async def Link(self, request_iterator: Any, context: Any) -> None:  # noqa: N802 (gRPC names it)
        """One link, from handshake to end."""
        del request_iterator  # frames are read through the context
        async with typed_errors(context):
            first = await self._first_frame(context)
            if first is not None:
                await self._serve(context, first)

    async def drain(self, grace_s: float, reason: str = "shutting down") -> None:
        """Reject new links, notify every router, wait until all have left or `grace_s` is over, then end the rest."""
        self._drain_reason = reason
        for peer in list(self._peers.values()):
            peer.send(self._drain_frame(reason))
        if await self._closed_within(grace_s):
            return
        for peer in list(self._peers.values()):
            peer.end(UnavailableError(f"worker: {reason}"))
        await self._closed_within(_STATUS_FLUSH_S)

    async def _serve(self, context: Any, first: Any) -> None:
        stream = FrameStream[Response, Request](
            context, self._response_type, lambda request: self._take(peer, request), self._limits
        )
        peer = LinkPeer(next(self._ids), first.hello.router_id or "unnamed", context.peer(), stream)
        self._check_room()  # again: others may have come in since the call began
        self._peers[peer.id] = peer
        self._all_closed.clear()
        try:
            await context.write(self._hello_frame())
            error = await self._pump(peer, stream)
        finally:
            del self._peers[peer.id]
            if not self._peers:
                self._all_closed.set()
        if error is not None:
            raise error

    async def _pump(self, peer: LinkPeer[Response], stream: FrameStream[Response, Request]) -> BetokenError | None:
        """The time between handshake and end, and why it ended."""
        error: BetokenError | None = None
        accepting = None
        if _router(peer) in self._refusals:  # it tries again, and will refuse again most likely
            accepting = asyncio.get_running_loop().call_later(_ACCEPTED_S, self._accepted, peer)
        else:
            self._accepted(peer)
        try:
            self._handler.link_opened(peer)
            if self._drain_reason is not None:  # the drain began during the handshake and has notified the others
                peer.send(self._drain_frame(self._drain_reason))
            error = await stream.run()
        finally:
            stream.end()
            if accepting is not None:
                accepting.cancel()
            self._ended(peer, error)
            self._handler.link_closed(peer)
        return error

    def _accepted(self, peer: LinkPeer[Response]) -> None:
        self._refusals.pop(_router(peer), None)
        _log.info("link %d to router %s at %s is up", peer.id, peer.name, peer.address)

    def _ended(self, peer: LinkPeer[Response], error: BetokenError | None) -> None:
        last = self._refusals.get(_router(peer))
        if peer.refusal is None:
            level = logging.INFO if last is None else logging.DEBUG
            _log.log(level, "link %d to router %s is down: %s", peer.id, peer.name, error or "closed by the router")
        elif peer.refusal != last:
            if len(self._refusals) >= _MAX_REFUSALS:
                self._refusals.pop(next(iter(self._refusals)))
            self._refusals[_router(peer)] = peer.refusal
            _log.warning("router %s at %s refuses this worker: %s", peer.name, peer.address, peer.refusal)

    async def _first_frame(self, context: Any) -> Any:
        """The router's first frame, checked; None when it left without one."""
        if self._drain_reason is not None:
            raise UnavailableError(f"worker: {self._drain_reason}")
        self._check_room()
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                first = await read_frame(context)
        except TimeoutError:
            raise DeadlineExceededError(f"no hello within {self._handshake_timeout_s} s") from None
        if first is None:
            return None
        if not first.HasField("hello"):
            raise InvalidArgumentError("hello", "absent", "must be set in the first frame of a link")
        if len(first.ListFields()) > 1:
            raise InvalidArgumentError("hello", "with entries", "must be alone in the first frame of a link")
        if first.hello.protocol_version != PROTOCOL_VERSION:
            raise FailedPreconditionError(
                f"hello.protocol_version = {first.hello.protocol_version}: this worker speaks {PROTOCOL_VERSION}"
            )
        if len(first.hello.router_id.encode()) > MAX_ROUTER_ID_BYTES:
            limit = f"must be at most {MAX_ROUTER_ID_BYTES} bytes"
            raise InvalidArgumentError("hello.router_id", first.hello.router_id, limit)
        return first

    def _check_room(self) -> None:
        if len(self._peers) >= self._max_links:
            raise ResourceExhaustedError(f"{self._max_links} links are open, the most this worker takes")

    def _take(self, peer: LinkPeer[Response], request: Any) -> None:
        if request.HasField("hello"):
            raise InvalidArgumentError("hello", "present", "must be in the first frame only")
        self._handler.frame(peer, request)
        if request.HasField("drain"):  # a router that leaves properly has closed its sequences
            if request.drain.is_refusal:
                peer.refusal = request.drain.reason
            peer.end()

    def _hello_frame(self) -> Response:
        frame: Any = self._response_type()
        frame.hello.CopyFrom(self._hello())
        frame.hello.protocol_version = PROTOCOL_VERSION
        return frame  # type: ignore[no-any-return]

    def _drain_frame(self, reason: str) -> Response:
        frame: Any = self._response_type()
        frame.drain.CopyFrom(Drain(reason=reason))
        return frame  # type: ignore[no-any-return]

    async def _closed_within(self, timeout_s: float) -> bool:
        if not self._peers:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            return False
        return True


def _router(peer: LinkPeer[Any]) -> tuple[str, str]:
    """Name and host, which stay from one link to the next."""
    return peer.name, peer.address.rpartition(":")[0]
