"""The first steps of every request: its id, its trace, its host and key, the limits on bodies and on their number.

Pure ASGI, without layers between an answer's events and the socket. Knows no endpoint.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Sequence

from opentelemetry import context
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from betoken.client import BetokenError
from betoken.common.logs import fields
from betoken.common.trace import context_from
from betoken.gateway.door import caller_headers
from betoken.gateway.errors import Failure, RefusedError, failure_of, retry_after
from betoken.gateway.hosts import AllowedHosts
from betoken.gateway.incomplete_bodies import MIN_BYTES_PER_S, IncompleteBodies
from betoken.gateway.json_structure import JsonStructure
from betoken.gateway.metrics import Metrics
from betoken.gateway.router_access import RouterAccess
from betoken.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
MAX_READS = 256
"""Requests without a body that are answered at once."""
MAX_KEY_BYTES = 4096
"""Longest header `authorization`: gRPC refuses more than 8 KiB of metadata as exhausted resources."""
_MAX_HEADER_BYTES = 8192
_MAX_RUNNING_BODIES = 32
"""Bodies of the largest size that may be held by requests being answered."""
_LIVENESS_PATH = "/version"
_LEFT = 499  # nginx's status for a client that left
_MAX_NAMES, _MAX_NAME_CHARS = 16, 64
"""Ignored fields named by one response."""
_UNSAFE = re.compile(r"[^\w.-]", re.ASCII)
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


class _Gone(Exception):
    """The client went away before its body had come."""


class Edge:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics, access: RouterAccess) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._access = access
        self._hosts = AllowedHosts(settings.allowed_hosts)
        self._incomplete = IncompleteBodies(settings.max_incomplete_bodies, settings.max_incomplete_body_bytes)
        self._num_running = self._num_reads = self._num_body_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, send)
        scope.setdefault("state", {})["request_id"] = passage.request_id
        token = context.attach(context_from(_header(scope, b"traceparent").decode("ascii", "replace")))
        try:
            if (failure := self._refusal(scope)) is not None:
                await passage.refuse(failure)
            elif scope["method"] in ("GET", "HEAD", "OPTIONS"):
                await self._read(scope, receive, passage)
            else:
                await self._write(scope, receive, passage)
        except _Gone:
            pass
        except Exception:
            _log.exception("request %s: a fault of the gateway", passage.request_id)
            if not passage.status:
                text = f"internal error; the gateway's log has the details under {passage.request_id}"
                await passage.refuse(Failure(500, text, None, "api_error", "internal_error"))
        finally:
            context.detach(token)
            passage.end(self._metrics)

    def _refusal(self, scope: Scope) -> Failure | None:
        """Check the head of a request."""
        for name, value in scope["headers"]:
            most = MAX_KEY_BYTES if name == b"authorization" else _MAX_HEADER_BYTES
            if len(value) > most:
                text = f"header {name.decode('latin-1')[:80]}: must have at most {most} bytes, has {len(value)}"
                return Failure(431, text, None, code="header_too_large")
        host = _header(scope, b"host").decode("latin-1")
        if not self._hosts.allows(host):
            text = f"host {host[:200]!r}: is not an address, localhost or one of --allowed-hosts"
            return Failure(403, text, None, "permission_error", "host_not_allowed")
        return None

    async def _read(self, scope: Scope, receive: Receive, passage: _Passage) -> None:
        """Answer a request without a body; the liveness probe always."""
        if self._num_reads >= MAX_READS and scope["path"] != _LIVENESS_PATH:
            await passage.refuse(_overloaded(f"{self._num_reads} requests without a body are being answered"))
            return
        self._num_reads += 1
        try:
            await self._app(scope, receive, passage.send)
        finally:
            self._num_reads -= 1

    async def _write(self, scope: Scope, receive: Receive, passage: _Passage) -> None:
        """Answer a request with a body. It counts once its body is complete."""
        body = self._full() or await self._check_key(scope) or await self._body(scope, receive)
        if isinstance(body, bytes) and (full := self._full(len(body))) is not None:
            body = full
        if isinstance(body, Failure):
            await passage.refuse(body)
            return
        num_bytes = len(body)
        self._num_running += 1
        self._num_body_bytes += num_bytes
        self._metrics.running.inc()
        replay = _replayed(body, receive)
        del body
        try:
            await self._app(scope, replay, passage.send)
        finally:
            self._num_running -= 1
            self._num_body_bytes -= num_bytes
            self._metrics.running.dec()

    def _full(self, num_bytes: int = 0) -> Failure | None:
        """The refusal of one more request, whose body has `num_bytes`."""
        if self._num_running >= self._settings.max_requests:
            return _overloaded(f"{self._num_running} requests are being answered")
        most = _MAX_RUNNING_BODIES * self._settings.max_body_bytes
        if self._num_running and self._num_body_bytes + num_bytes > most:
            return _overloaded(f"requests of {self._num_body_bytes} bytes are being answered")
        return None

    async def _check_key(self, scope: Scope) -> Failure | None:
        """Check the caller's key before its body is read."""
        try:
            await self._access.check_key(caller_headers(Request(scope)))
        except RefusedError as refused:
            return refused.failure
        except BetokenError as error:
            return failure_of(error)
        return None

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Failure:
        """The whole body, or why it is not taken.

        Raises:
            _Gone: the client went away.
        """
        most, structure = self._settings.max_body_bytes, JsonStructure()
        parts: list[bytes] = []
        length = _header(scope, b"content-length")
        too_large = Failure(413, f"the body must be at most {most} bytes", None, code="body_too_large")
        if length.isdigit() and (len(length) > 15 or int(length) > most):
            return too_large
        body = self._incomplete.begin(scope["client"][0] if scope.get("client") else "", self._settings.body_timeout_s)
        try:
            async with body:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    part = message.get("body", b"")
                    body.received(len(part))
                    if body.num_bytes > most:
                        return too_large
                    if structure.excess:
                        parts.clear()  # the rest is read all the same: clients read no response while they send
                    else:
                        parts.append(part)
                        structure.feed(part)
                    if not message.get("more_body", False):
                        excess = structure.excess
                        return Failure(413, excess, None, code="body_too_large") if excess else b"".join(parts)
        except TimeoutError:
            if body.is_evicted:
                return _overloaded("too many bodies are arriving")
            text = (
                f"the body did not come within {self._settings.body_timeout_s:g} s"
                f" at {MIN_BYTES_PER_S} bytes a second or more"
            )
            return Failure(408, text, None, code="timeout")


def _overloaded(text: str) -> Failure:
    return Failure(503, f"{text}, which is the most", None, "api_error", "overloaded", retry_after(1.0))


class _Passage:
    """One request on its way: its id on the reply, and what the log says of it."""

    def __init__(self, scope: Scope, send: Send) -> None:
        given = _header(scope, b"x-request-id")
        self.request_id = given.decode() if _REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        self.status = 0
        """HTTP status of the reply; 0 before it has begun."""
        self._scope = scope
        self._send = send
        self._begin_s = time.perf_counter()

    async def send(self, message: Message) -> None:
        """The messages that the application sends."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if ignored := self._scope["state"].get("ignored_fields"):
                message["headers"].append((b"warning", _warning(ignored)))
        await self._send(message)

    async def refuse(self, failure: Failure) -> None:
        """Send an error. The rest of a body is not read: the connection ends with it."""
        response = JSONResponse(failure.body(), failure.status, {**failure.headers, "connection": "close"})
        await response(self._scope, _never, self.send)

    def end(self, metrics: Metrics) -> None:
        """A line in the log, and the counters."""
        took_s = time.perf_counter() - self._begin_s
        route = getattr(self._scope.get("route"), "path", "other")  # a path in itself may be anything
        metrics.request_ended(self._scope["method"], route, self.status or _LEFT, took_s)
        named = {name: self._scope[name] for name in ("method", "path")}
        outcome = {"status": self.status or _LEFT, "duration_s": round(took_s, 6)}
        _log.info("request ended", extra=fields(request_id=self.request_id, **named, **outcome))


def _warning(ignored: Sequence[str]) -> bytes:
    """Value of the header `warning` about these fields, whose names are the client's own text."""
    names = ", ".join(_UNSAFE.sub("?", name[:_MAX_NAME_CHARS]) for name in ignored[:_MAX_NAMES])
    rest = f" and {len(ignored) - _MAX_NAMES} more" if len(ignored) > _MAX_NAMES else ""
    return f'299 betoken "ignored unknown fields: {names}{rest}"'.encode()


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body in front, whole; it is not kept once it is given."""
    left = [body]

    async def replay() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return replay


async def _never() -> Message:
    raise AssertionError("a refusal reads nothing")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
