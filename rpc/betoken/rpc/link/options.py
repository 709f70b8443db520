"""Options of a router's connections to workers, callbacks of a link, and its channel."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from betoken.common.errors import BetokenError, FailedPreconditionError
from betoken.common.tls import ClientTls
from betoken.rpc.link.outbox import OutboxLimits
from betoken.v1.types_pb2 import WorkerHello

MAX_RECEIVED_BYTES = 4 << 20
"""Largest frame taken from a worker: four times what its frames grow to, and no entry of its is as large as one."""

Response = TypeVar("Response", bound=Message)


class LinkState(StrEnum):
    """How a link is doing."""

    CONNECTING = "connecting"
    """Not connected; dialled again and again."""
    LOADING = "loading"
    """The worker listens and loads its model; dialled often."""
    READY = "ready"
    """Connected; takes new sequences."""
    DRAINING = "draining"
    """Connected, but the worker is shutting down: place nothing new."""
    REFUSED = "refused"
    """One side refused the other's handshake; dialled again, in case the worker is replaced."""
    CLOSED = "closed"
    """`close` was called, or `run` was cancelled."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """How a router dials a worker."""

    router_id: str = "router"
    """Name in the worker's log, at most 128 bytes."""
    tls: ClientTls | None = None
    """None = plain text."""
    connect_timeout_s: float = 5.0
    """Longest time for dialling and handshake together."""
    initial_backoff_s: float = 0.1
    """Pause after the first failure; doubles with each, jittered down to half."""
    max_backoff_s: float = 5.0
    """Longest pause."""
    max_local_backoff_s: float = 0.3
    """Longest pause for a Unix socket, and for a worker that is loading."""
    max_refused_backoff_s: float = 60.0
    """Longest further pause after a refused handshake, as long as the same process listens there."""
    stable_s: float = 5.0
    """A link that was up this long starts again with the first pause."""
    keepalive_time_s: float = 10.0
    """Interval of pings on an idle link; at least the server's `MIN_PING_INTERVAL_S`."""
    keepalive_timeout_s: float = 5.0
    """A ping unanswered this long breaks the link."""
    drain_timeout_s: float = 2.0
    """How long `close` waits for the worker's last frames."""
    limits: OutboxLimits = field(default_factory=OutboxLimits)
    """Sizes of frames and backlog."""


@dataclass(frozen=True, slots=True)
class LinkCallbacks(Generic[Response]):
    """A link's events for its owner, always on the event loop. None of them may block."""

    on_frame: Callable[[Response], None]
    """(frame): every frame after the handshake. A `BetokenError` raised here ends the link and re-dials."""
    on_up: Callable[[], None]
    """(): handshake done; `link.hello` is set."""
    on_down: Callable[[BetokenError], None]
    """(why): the link ended; its sequences are gone from the worker. Once per `on_up`."""
    check_hello: Callable[[WorkerHello], None]
    """(hello): raises a `BetokenError` for a worker that does not fit."""
    on_loading: Callable[[], None] = lambda: None
    """(): the worker reports that it loads; once until it does something else."""


def open_channel(address: str, options: LinkOptions) -> grpc.aio.Channel:
    """A channel with a dedicated connection to `address`; it connects on the first call.

    Raises:
        FailedPreconditionError, InvalidArgumentError: of `link_credentials`.
    """
    channel_options: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),  # one connection per link
        ("grpc.max_send_message_length", options.limits.max_message_bytes),
        ("grpc.max_receive_message_length", MAX_RECEIVED_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),  # short: the link itself paces the dials
        ("grpc.max_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(options.connect_timeout_s * 1000)),  # the time one attempt may take
        ("grpc.keepalive_time_ms", int(options.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(options.keepalive_timeout_s * 1000)),  # what counts; a minute by default
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),  # containers inherit one for the web; workers are on the router's network
    ]
    if options.tls is None:
        return grpc.aio.insecure_channel(address, channel_options)
    return grpc.aio.secure_channel(
        address, link_credentials(options.tls), channel_options + options.tls.channel_options()
    )


def link_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials of the files as they are now.

    Raises:
        FailedPreconditionError: a file cannot be read.
        InvalidArgumentError: a file is not PEM, or the key is another certificate's.
    """
    try:
        return tls.credentials()
    except OSError as error:
        raise FailedPreconditionError(f"cannot read a TLS file: {error}") from error
