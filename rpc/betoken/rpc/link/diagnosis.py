"""Diagnoses failed connections whose gRPC status is uninformative, and notifies rejected workers.

Knows no link.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from betoken.common import tls
from betoken.common.errors import (
    BetokenError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    LoadingError,
    UnavailableError,
    UnimplementedError,
    from_status,
)
from betoken.common.grpc_words import with_cause
from betoken.rpc.link.options import LinkState
from betoken.rpc.link.stream import read_frame

_TIMEOUT_S = 1.0
_SERVICES = {
    "betoken.v1.VerifyService": "a verify worker",
    "betoken.v1.DraftService": "a draft worker",
    "betoken.v1.GenerationService": "a router",
}


async def explain(error: BetokenError, role: str, channel: grpc.aio.Channel, dial: Callable[[], Any]) -> BetokenError:
    """Words for a handshake that failed with `error`; `dial` begins another call of the same method."""
    if isinstance(error, InternalError):
        error = await _status_without_writing(dial) or error
    if isinstance(error, UnimplementedError):
        return FailedPreconditionError(f"no {role} worker listens there: {await _listener(channel)} does")
    return with_cause(tls.with_file_names(error))


def state_after(error: BetokenError) -> LinkState:
    """Return the state of a link whose handshake failed with `error`."""
    if isinstance(error, LoadingError):
        return LinkState.LOADING
    is_refused = isinstance(error, FailedPreconditionError | InvalidArgumentError)
    return LinkState.REFUSED if is_refused else LinkState.CONNECTING


async def send_refusal(call: Any, frame: Any) -> None:
    """Write the frame that says why, so that the worker's log has it too, and wait shortly for it to end the call."""
    with suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, BetokenError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            await call.write(frame)
            while await read_frame(call) is not None:
                pass


async def status_of(call: Any) -> BetokenError:
    """The error a call has ended with, for a write that found it ended."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return UnavailableError("the worker closed the link")
    return from_status(code, await call.details() or "", await call.trailing_metadata())


async def _status_without_writing(dial: Callable[[], Any]) -> BetokenError | None:
    """The status of a server that ends a call unheard: a write that comes after it turns it into INTERNAL."""
    call = dial()
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return from_status(await call.code(), await call.details() or "", await call.trailing_metadata())
    except TimeoutError:  # it would have listened
        return None
    finally:
        call.cancel()


async def _listener(channel: grpc.aio.Channel) -> str:
    health: Any = health_pb2_grpc.HealthStub(channel)
    for name, what in _SERVICES.items():
        try:
            await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=_TIMEOUT_S)
            return what
        except grpc.RpcError:
            continue
    return "another gRPC service"
