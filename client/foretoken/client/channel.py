"""What both kinds of channel to a router have in common: options, and the headers of a call.

Opens nothing itself.
"""

from __future__ import annotations

from typing import Any

import grpc
from opentelemetry import propagate

from foretoken.rpc.errors import ForetokenError, RequestCancelledError, UnavailableError, from_rpc_error
from foretoken.rpc.tls import ClientTls
from foretoken.v1 import generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_RECONNECT_MS = 2_000


def channel_options(tls: ClientTls | None) -> list[tuple[str, Any]]:
    """Options of a channel."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # A router that restarts is found again within the retries of a call; gRPC's own bound is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
    ]
    return options + (tls.channel_options() if tls else [])


def generation_stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The methods of the router over either kind of channel; generated code has no types."""
    return generation_pb2_grpc.GenerationServiceStub(channel)


def call_metadata() -> tuple[tuple[str, str], ...]:
    """Headers of a call: the W3C trace context of the caller, if there is one."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())


def call_error(error: grpc.RpcError, is_cancelled: bool) -> ForetokenError:
    """The typed error of a failed call; a cancellation that the caller did not ask for is a lost stream."""
    typed = from_rpc_error(error)
    if isinstance(typed, RequestCancelledError) and not is_cancelled:
        return UnavailableError(f"the stream was cut off: {typed}", request_id=typed.request_id)
    return typed
