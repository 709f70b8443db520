"""Real `grpc.aio` servers on port 0, an echoing worker, and links whose events are recorded."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from betoken.rpc.link import LinkCallbacks, LinkOptions, LinkServicer, LoadingServicer, OutboxLimits, VerifyLink
from betoken.rpc.server import PING_OPTIONS
from betoken.v1 import verify_pb2_grpc
from betoken.v1.types_pb2 import WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkRequest, VerifyLinkResponse
from tests.certificates import make_certificate

HELLO = WorkerHello(role="verify", worker_id="w1", vocab_size=64, max_context=128)
LINK_METHOD = "/betoken.v1.VerifyService/Link"


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the condition is anybody's)
            await asyncio.sleep(0.005)


class EchoHandler:
    """Answers every block with a verification result that accepts it whole; remembers what came."""

    def __init__(self) -> None:
        self.links: list[Any] = []
        self.closed: list[int] = []
        self.requests: list[VerifyLinkRequest] = []
        self.fault: Exception | None = None

    def link_opened(self, link: Any) -> None:
        self.links.append(link)

    def link_closed(self, link: Any) -> None:
        self.closed.append(link.id)

    def frame(self, link: Any, request: VerifyLinkRequest) -> None:
        self.requests.append(request)
        if self.fault is not None:
            raise self.fault
        response = VerifyLinkResponse()
        for block in request.blocks:
            response.results.add(sequence_id=block.sequence_id, num_accepted=len(block.draft_ids), next_id=7)
        response.load.running = len(request.blocks)
        link.send(response)


@dataclass
class Worker:
    """A running verify worker that echoes."""

    port: int
    server: grpc.aio.Server
    servicer: LinkServicer[VerifyLinkRequest, VerifyLinkResponse]
    handler: EchoHandler

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_links(self) -> int:
        """Links past their handshake."""
        return len(self.servicer._peers)


@dataclass
class RecordedLink:
    """A router's link and all callbacks to its owner."""

    link: VerifyLink
    frames: list[VerifyLinkResponse] = field(default_factory=list)
    ups: int = 0
    num_loads: int = 0
    downs: list[Exception] = field(default_factory=list)

    @property
    def results(self) -> list[Any]:
        return [result for frame in self.frames for result in frame.results]


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """Stops in reverse order what a test has started."""
    async with AsyncExitStack() as exits:
        yield exits


@pytest.fixture
def start_worker(stack: AsyncExitStack) -> Callable[..., Awaitable[Worker]]:
    async def start(
        port: int = 0, hello: WorkerHello = HELLO, early: LoadingServicer | None = None, **options: Any
    ) -> Worker:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *PING_OPTIONS])
        handler = EchoHandler()
        servicer = LinkServicer(lambda: hello, handler, VerifyLinkResponse, **options)
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(early or servicer, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        stack.push_async_callback(server.stop, None)
        return Worker(bound, server, servicer, handler)

    return start


@pytest.fixture
def start_link(stack: AsyncExitStack) -> Callable[..., Awaitable[RecordedLink]]:
    async def start(
        address: str,
        *,
        check_hello: Callable[[WorkerHello], None] = lambda hello: None,
        on_frame: Callable[[Any], None] | None = None,
        limits: OutboxLimits | None = None,
        wait: bool = True,
        **more: Any,
    ) -> RecordedLink:
        def record_up() -> None:
            recorded.ups += 1

        def record_loading() -> None:
            recorded.num_loads += 1

        callbacks = LinkCallbacks(
            on_frame=on_frame or (lambda frame: recorded.frames.append(frame)),
            on_up=record_up,
            on_down=lambda error: recorded.downs.append(error),
            check_hello=check_hello,
            on_loading=record_loading,
        )
        timing: dict[str, Any] = {"initial_backoff_s": 0.02, "max_backoff_s": 0.1, "connect_timeout_s": 2.0}
        options = LinkOptions(limits=limits or OutboxLimits(), **timing | more)
        recorded = RecordedLink(VerifyLink(address, callbacks, options))
        await stack.enter_async_context(_running(recorded.link))
        if wait:
            await eventually(lambda: recorded.ups)
        return recorded

    return start


@asynccontextmanager
async def _running(link: VerifyLink) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        yield
        await link.close()


@pytest.fixture
def raw_call(stack: AsyncExitStack) -> Callable[[str], Any]:
    """A link whose requests are bytes, for frames no router would send."""

    def call(address: str) -> Any:
        channel = grpc.aio.insecure_channel(address)
        stack.push_async_callback(channel.close)
        method = channel.stream_stream(
            LINK_METHOD, request_serializer=lambda frame: frame, response_deserializer=VerifyLinkResponse.FromString
        )
        return method()

    return call


@pytest.fixture
def certificates(tmp_path) -> Path:
    """server.{pem,key} for localhost, client.{pem,key}, stranger.{pem,key}; each signs itself."""
    for name in ("server", "client", "stranger"):
        make_certificate(tmp_path, name, "localhost")
    return tmp_path
