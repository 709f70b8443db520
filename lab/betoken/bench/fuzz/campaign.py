"""Sends mutants to a service and says how it answered each; one that answers with a fault of its own is named.

Knows methods and statuses; whether answers of others stay right its caller checks, after each batch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from betoken.testing.mutation import Mutator
from betoken.v1.draft_pb2 import DraftLinkRequest
from betoken.v1.types_pb2 import RouterHello
from betoken.v1.verify_pb2 import VerifyLinkRequest

SERVICE = "/betoken.v1.GenerationService"
LINKS = {"verify": "/betoken.v1.VerifyService/Link", "draft": "/betoken.v1.DraftService/Link"}
_HELLOS: dict[str, Any] = {"verify": VerifyLinkRequest, "draft": DraftLinkRequest}
_AT_ONCE = 8
_TIMEOUT_S = 60.0
_MAX_MESSAGES = 6
"""Messages of an answer that are read before it is cancelled."""
_FRAMES_PAUSE_S = 0.002
_ROUNDS = 3
"""Times that the good frames are gone through on one link."""
_MUTANT_SHARE = 0.7
_STREAMS = frozenset({"Generate"})
_OWN_FAULTS = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]

_EOF: Any = cast(Any, grpc.aio).EOF
_LOST_HERE = "Internal error from Core"
"""What `grpc.aio` says at this end where a write came after the other had ended the call."""

Check = Callable[[], Awaitable[None]]


class FaultError(Exception):
    """A service answered a mutant with a fault of its own, or not at all; names the mutant's bytes."""


async def fuzz_calls(
    address: str, method: str, seeds: Sequence[Message], mutator: Mutator, count: int, check: Check, batch: int = 250
) -> Counter[str]:
    """Call a method of the public service with `count` mutants; how many got which status. `check` follows each batch.

    Raises:
        FaultError: one was answered INTERNAL or UNKNOWN, or not in time.
    """
    statuses: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(address, _OPTIONS) as channel:
        for start in range(0, count, batch):
            mutants = [mutator.mutant_bytes(mutator.random.choice(seeds)) for _ in range(min(batch, count - start))]
            statuses.update(await _bounded([_call(channel, method, mutant) for mutant in mutants]))
            await check()
    return statuses


async def _bounded(calls: Sequence[Awaitable[str]]) -> list[str]:
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(call: Awaitable[str]) -> str:
        async with places:
            return await call

    return await asyncio.gather(*(one(call) for call in calls))


async def _call(channel: Any, method: str, mutant: bytes) -> str:
    path = f"{SERVICE}/{method}"
    if method not in _STREAMS:
        call: Any = channel.unary_unary(path)(mutant, timeout=_TIMEOUT_S)
    else:
        call = channel.unary_stream(path)(mutant, timeout=_TIMEOUT_S)
        try:
            for _ in range(_MAX_MESSAGES):
                if await call.read() is _EOF:
                    break
            else:
                call.cancel()
        except (grpc.RpcError, asyncio.CancelledError):
            if _is_cancelled():
                raise
    return _named(await call.code(), await call.details(), method, mutant)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _named(code: grpc.StatusCode, details: str | None, method: str, mutant: bytes) -> str:
    if details == _LOST_HERE:
        return "LOST"
    if code in _OWN_FAULTS or code is grpc.StatusCode.DEADLINE_EXCEEDED and "request" not in (details or ""):
        raise FaultError(f"{method}: {code.name} {details!r} for {mutant[:2000].hex()}")
    return code.name


async def fuzz_link(
    address: str,
    role: str,
    frames: Callable[[int], list[Message]],
    mutator: Mutator,
    count: int,
    check: Check,
    batch: int = 250,
) -> Counter[str]:
    """Be a router to a worker, `count` mutated frames long, over as many links as that takes; how many links ended with
    which status. `frames` gives good ones for sequences from a number on.

    Raises:
        FaultError: the worker ended a link with a fault of its own.
    """
    statuses: Counter[str] = Counter()
    num_sent = num_checked = 0
    while num_sent < count:
        async with grpc.aio.insecure_channel(address, _OPTIONS) as channel:
            sent, status = await _link(channel, role, frames, mutator)
        num_sent += sent
        statuses[status] += 1
        if num_sent - num_checked >= batch or num_sent >= count:
            num_checked = num_sent
            await check()
    return statuses


async def _link(channel: Any, role: str, frames: Callable[[int], list[Message]], mutator: Mutator) -> tuple[int, str]:
    call: Any = channel.stream_stream(LINKS[role])(timeout=_TIMEOUT_S)
    hello = _HELLOS[role](hello=RouterHello(protocol_version=1, router_id="fuzz"))
    is_hello_good = mutator.random.random() < 0.9
    reading = asyncio.ensure_future(_read_all(call))
    damaged_share = mutator.random.choice((0.0, 0.0, 0.2))  # bytes that are no frame end the link
    num_sent, last = 0, b""
    try:
        await call.write(hello.SerializeToString() if is_hello_good else mutator.mutant_bytes(hello))
        for first_id in range(1, 10 * _ROUNDS, 10):
            for frame in frames(first_id):
                is_mutant = mutator.random.random() < _MUTANT_SHARE
                last = mutator.mutant_bytes(frame, damaged_share) if is_mutant else frame.SerializeToString()
                num_sent += is_mutant
                await call.write(last)
                await asyncio.sleep(_FRAMES_PAUSE_S)
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        pass  # the link has ended
    else:
        await asyncio.sleep(mutator.random.choice((0.0, 0.02)))
        call.cancel()
    await asyncio.wait({reading}, timeout=_TIMEOUT_S)
    if not reading.done():
        call.cancel()
        raise FaultError(f"{role} link: did not end")
    return max(1, num_sent), _named(await call.code(), await call.details(), f"{role} link", last)


async def _read_all(call: Any) -> None:
    try:
        while await call.read() is not _EOF:
            pass
    except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
        pass
