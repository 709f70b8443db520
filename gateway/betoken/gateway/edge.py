"""The first steps of every request: its id, its trace, the limits on bodies and on their number.

Pure ASGI, so that nothing stands between an answer's events and the socket. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

from opentelemetry import context
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from betoken.common.logs import fields
from betoken.common.trace import context_from
from betoken.gateway.errors import Failure, retry_after
from betoken.gateway.metrics import Metrics
from betoken.gateway.settings import GatewaySettings

_log = logging.getLogger(__name__)
_LEFT = 499  # nginx's status for a client that left
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)


class _Gone(Exception):
    """The client went away before its body had come."""


class Edge:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, settings: GatewaySettings, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._settings = settings
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, send)
        scope.setdefault("state", {})["request_id"] = passage.request_id
        token = context.attach(context_from(_header(scope, b"traceparent").decode("ascii", "replace")))
        try:
            await self._pass(scope, receive, passage)
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

    async def _pass(self, scope: Scope, receive: Receive, passage: _Passage) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, passage.send)
            return
        if self._num_running >= self._settings.max_requests:
            text = f"{self._num_running} requests are being answered, which is the most"
            await passage.refuse(Failure(503, text, None, "api_error", "overloaded", retry_after(1.0)))
            return
        self._num_running += 1
        self._metrics.running.inc()
        try:
            body = await self._body(scope, receive)
            if isinstance(body, Failure):
                await passage.refuse(body)
            else:
                await self._app(scope, _replayed(body, receive), passage.send)
        finally:
            self._num_running -= 1
            self._metrics.running.dec()

    async def _body(self, scope: Scope, receive: Receive) -> bytes | Failure:
        """The whole body, or why it is not taken.

        Raises:
            _Gone: the client went away.
        """
        most, parts, num_bytes = self._settings.max_body_bytes, [], 0
        length = _header(scope, b"content-length")
        too_large = Failure(413, f"the body must be at most {most} bytes", None, code="body_too_large")
        if length.isdigit() and (len(length) > 15 or int(length) > most):
            return too_large
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > most:
                        return too_large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            text = f"the body did not come within {self._settings.body_timeout_s:g} s"
            return Failure(408, text, None, code="timeout")


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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body in front, whole."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _never() -> Message:
    raise AssertionError("a refusal reads nothing")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")
