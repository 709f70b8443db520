"""Shared part of the fake workers: a real `grpc.aio` server, links with handshake, one batched step at a time.

Uses the protocol only, not the project's own link code, so that both sides of that code are tested against it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from betoken.v1.types_pb2 import OpenSequence, SamplingParams, WorkerHello

_RESOLVED = [
    field.name
    for field in SamplingParams.DESCRIPTOR.fields
    if field.has_presence and field.name not in ("logprobs", "prompt_logprobs")
]
"""Sampling fields that a router sets in every request."""
LOOPBACK = "127.0.0.1"
_starts = itertools.count(1)
_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),  # by default an idle link ends at its third ping
)


class FakeLink:
    """One connected router."""

    def __init__(self, context: Any) -> None:
        self.context = context
        self.sequences: dict[int, Any] = {}


class FakeWorker(ABC):
    """A worker without a model. `violations` collects what a router did against the protocol."""

    role = ""

    def __init__(self, hello: WorkerHello, step_s: float = 0.0, host: str = LOOPBACK) -> None:
        """`step_s` is the pretended duration of a forward; `host` an address or `unix:/PATH`."""
        self.host = host
        self.hello = hello
        self.step_s = step_s
        self.violations: list[str] = []
        self.opened: list[OpenSequence] = []
        """Every open, in order."""
        self.num_closed = 0
        self.num_steps = 0
        self.port = 0
        self.is_hanging = False
        self.is_stepping = False
        """Whether a step is under way."""
        self.credentials: grpc.ServerCredentials | None = None
        """Set before `start` to speak TLS."""
        self.links: list[FakeLink] = []
        self.tamper: Callable[[Any], Any] = lambda frame: frame
        """Transforms its frames, except the hello, before they are sent."""
        self._seen_ids: set[int] = set()
        self._server: grpc.aio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None
        self.work = asyncio.Event()
        self._says_drain = False

    @property
    def address(self) -> str:
        """Its address."""
        return self.host if self.host.startswith("unix:") else f"{self.host}:{self.port}"

    @property
    def num_open(self) -> int:
        """Sequences open on all links."""
        return sum(len(link.sequences) for link in self.links)

    async def start(self) -> None:
        """Serve; on the same port as before after `kill`."""
        self.hello.worker_id = f"fake-{next(_starts)}"
        self._server = grpc.aio.server(options=_OPTIONS)
        self._register(self._server)
        if self.credentials is None:
            self.port = self._server.add_insecure_port(self.address)
        else:
            self.port = self._server.add_secure_port(self.address, self.credentials)
        await self._server.start()
        self._stepper = asyncio.ensure_future(self._run_steps())

    async def kill(self) -> None:
        """Die at once: links break, sequences are gone."""
        if self._stepper is not None:
            self._stepper.cancel()
        if self._server is not None:
            await self._server.stop(None)
        self.links.clear()

    async def drain(self) -> None:
        """Ask all routers to leave, with the next step: a stream has one writer."""
        self._says_drain = True
        self.work.set()

    async def Link(self, requests: AsyncIterator[Any], context: Any) -> None:  # noqa: N802 (gRPC names it)
        """The servicer's method."""
        link = FakeLink(context)
        first = True
        try:
            async for frame in requests:
                if first:
                    first = False
                    if not frame.HasField("hello"):
                        self.violations.append("first frame without hello")
                    await context.write(self._hello_frame())
                    self.links.append(link)
                self.take(link, frame)
                if frame.HasField("drain"):
                    return
        finally:
            if link in self.links:
                self.links.remove(link)

    def check_open(self, entry: OpenSequence) -> None:
        """Note what is wrong with an open."""
        if entry.sequence_id in self._seen_ids:
            self.violations.append(f"sequence id {entry.sequence_id} was used before")
        self._seen_ids.add(entry.sequence_id)
        self.opened.append(entry)
        missing = [name for name in _RESOLVED if not entry.sampling.HasField(name)]
        if missing or not entry.prompt_ids or not entry.sequence_id:
            self.violations.append(f"unresolved open: {missing}, {len(entry.prompt_ids)} prompt ids")
        if len(entry.prompt_ids) + len(entry.committed_ids) >= entry.max_length:
            self.violations.append("opened without room for a token")

    def close(self, link: FakeLink, sequence_id: int) -> None:
        """Free a sequence."""
        if link.sequences.pop(sequence_id, None) is not None:
            self.num_closed += 1

    async def _run_steps(self) -> None:
        while True:
            await self.work.wait()
            self.work.clear()
            while not self.is_hanging and self.has_work():
                self.is_stepping = True
                started_ns = time.perf_counter_ns()
                if self.step_s:
                    await asyncio.sleep(self.step_s)
                frames = self.step(started_ns)
                self.num_steps += 1
                for link, frame in frames:
                    try:
                        await link.context.write(self.tamper(frame))
                    except (grpc.aio.BaseError, asyncio.InvalidStateError, grpc.RpcError):
                        continue
                await asyncio.sleep(0)
            self.is_stepping = False

    @abstractmethod
    def _register(self, server: grpc.aio.Server) -> None: ...

    @abstractmethod
    def _hello_frame(self) -> Any: ...

    @abstractmethod
    def take(self, link: FakeLink, frame: Any) -> None:
        """Apply a frame's entries."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do something."""

    @abstractmethod
    def step(self, started_ns: int) -> list[tuple[FakeLink, Any]]:
        """One batched forward: a frame per link. `started_ns` is when it began (`time.perf_counter_ns()`)."""
