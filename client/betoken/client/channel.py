"""Shared parts of both kinds of channel to a router: options, and the headers of a call.

Opens nothing itself.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

import grpc

from betoken.client.config import RetryPolicy
from betoken.common.address import is_target
from betoken.common.api_key import API_KEY_VARIABLE, authorization, check_api_key
from betoken.common.errors import (
    BetokenError,
    InternalError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    from_rpc_error,
)
from betoken.common.grpc_words import with_cause
from betoken.common.names import RPC_METHOD
from betoken.common.tls import ClientTls, with_file_names
from betoken.common.trace import Span, SpanKind, rpc_attributes, span, traceparent_of
from betoken.v1 import generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
DEFAULT_TIMEOUT_S = 600.0
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_RECONNECT_MS = 2_000
_MIN_RESOLUTION_MS = 1_000
_KEEPALIVE_TIME_MS = 30_000  # a router disconnects those who ping more often than every 5 s
_KEEPALIVE_TIMEOUT_MS = 10_000
_TOO_LARGE = re.compile(r"message larger than max \((\d+) vs\. (\d+)\)")  # gRPC's words, at either end
_HEADER_NAME = re.compile(r"(?!grpc-)(?!.*-bin$)[a-z0-9_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")
_CUT_OFF = re.compile(r"RST_STREAM|END_STREAM")  # gRPC's text for a stream that ends without a status, as proxies do


def check_settings(address: str, tls: ClientTls | None, retry: RetryPolicy | None) -> None:
    """Raises:
    InvalidArgumentError: `address` is invalid (neither HOST:PORT nor a URI of a gRPC scheme), or
        `tls` or `retry` is something else.
    """
    if tls is not None and not isinstance(tls, ClientTls):
        raise InvalidArgumentError("tls", tls, "must be a ClientTls")
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise InvalidArgumentError("retry", retry, "must be a RetryPolicy")
    if not isinstance(address, str) or not is_target(address):
        raise InvalidArgumentError("address", address, "must be HOST:PORT, unix:/PATH or dns:///HOST:PORT")


def channel_options(address: str, tls: ClientTls | None) -> list[tuple[str, Any]]:
    """Options of a channel to `address`."""
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # A machine that dies sends no sign; without pings a stream would wait for its deadline.
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS),  # what counts; a minute by default
        # A router that restarts is found again within the retries of a call; gRPC's own bound is two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_MS),
        # A router that comes back at another address must be found, too: gRPC asks the DNS every half minute at most.
        ("grpc.dns_min_time_between_resolutions_ms", _MIN_RESOLUTION_MS),
    ]
    if _is_own(address) or _is_beyond_proxies(address):  # gRPC would ask the environment's http_proxy for those, too
        options.append(("grpc.enable_http_proxy", 0))
    return options + (tls.channel_options() if tls else [])


def generation_stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The methods of the router over either kind of channel; generated code has no types."""
    return generation_pb2_grpc.GenerationServiceStub(channel)


def call_span(method: str, name: str = "") -> AbstractContextManager[Span]:
    """The span of a call over all its attempts, a child of whatever span is current; `name` empty = the method's."""
    attributes = rpc_attributes(method)
    return span(name or str(attributes[RPC_METHOD]), kind=SpanKind.CLIENT, attributes=attributes)


def call_metadata(source: Span, headers: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Headers of a call: the caller's, and the W3C trace context of its span."""
    traceparent = traceparent_of(source)
    own = (("traceparent", traceparent),) if traceparent else ()
    return (*(headers or {}).items(), *own)


def key_headers(api_key: str | None) -> Mapping[str, str]:
    """The headers that send `api_key`; None = the one in the environment, empty = none.

    Raises:
        InvalidArgumentError: no header can hold it.
    """
    key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    return {} if key == "" else dict((authorization(check_api_key(key)),))


def checked_headers(headers: Mapping[str, str] | None, own: Mapping[str, str]) -> Mapping[str, str]:
    """The caller's headers of a call, none for None, and the client's `own` unless overridden.

    Raises:
        InvalidArgumentError: a name or a value that gRPC does not send.
    """
    if headers is not None and not isinstance(headers, Mapping):
        raise InvalidArgumentError("headers", headers, "must map names to text")
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidArgumentError("headers", name, "must be named by lower-case letters, digits, - _ and .")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise InvalidArgumentError(f"headers[{name}]", type(value).__name__, "must be printable ASCII")
    return {**own, **(headers or {})}


def call_error(error: grpc.RpcError, is_cancelled: bool) -> BetokenError:
    """The typed error of a failed call. A cancellation that the caller did not ask for counts as a lost stream, and so
    does a proxy's reset."""
    typed = with_file_names(from_rpc_error(error))
    if isinstance(typed, ResourceExhaustedError) and (sizes := _TOO_LARGE.search(str(typed))):
        num_bytes, most = (int(size) for size in sizes.groups())  # no overload: it will not fit later either
        return InvalidArgumentError("message", num_bytes, f"must be at most {most} bytes", request_id=typed.request_id)
    is_cut_off = isinstance(typed, InternalError) and not typed.request_id and _CUT_OFF.search(str(typed))
    if is_cut_off or (isinstance(typed, RequestCancelledError) and not is_cancelled):
        return UnavailableError(f"the stream was cut off: {typed}", request_id=typed.request_id)
    return with_cause(typed)


def _is_beyond_proxies(address: str) -> bool:
    """Whether gRPC would ask a proxy for such an address: a list of addresses, or a name for a socket."""
    return "," in address or address.startswith("unix-abstract:")


def _is_own(address: str) -> bool:
    """Whether an address, as gRPC takes it (`HOST:PORT`, `dns:///HOST:PORT`, `ipv6:[HOST]:PORT`) is of this machine."""
    host = address.lower().rpartition("/")[2].removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:")
    host = host.rpartition(":")[0].strip("[]") if host.count(":") == 1 or host.startswith("[") else host
    place = _ip(host)
    return _is_own_name(host.removesuffix(".")) if place is None else _is_own_place(place)


def _is_own_name(host: str) -> bool:
    own = socket.gethostname().lower()
    if host in ("localhost", "localhost.localdomain", own) or host.endswith(".localhost"):
        return True
    if host.partition(".")[0] != own.partition(".")[0]:
        return False
    try:  # it begins with this machine's name: only a lookup distinguishes box.here from box.there
        found = [_ip(str(entry[4][0])) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return False
    return any(place is not None and _is_own_place(place) for place in found)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _is_own_place(place: IPv4Address | IPv6Address) -> bool:
    place = getattr(place, "ipv4_mapped", None) or place
    return place.is_loopback or place.is_unspecified or _is_source(place)


def _is_source(place: IPv4Address | IPv6Address) -> bool:
    """Whether what is sent to `place` would leave from it, as it does for this machine's own address only."""
    family = socket.AF_INET if place.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(place), 1))  # sends nothing
            return bool(probe.getsockname()[0] == str(place))
    except OSError:  # no way there
        return False
