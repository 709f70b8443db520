"""uvicorn's HTTP protocol with the bounds that it lacks: on the wait for a request's head and on its size, on
connections without a request in progress, and on the time that an answer stays unread.

uvicorn's own timer ends with any byte, such as a stray CRLF, and its `limit_concurrency` would refuse liveness probes.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from betoken.gateway.connections import IdleConnections
from betoken.gateway.errors import Failure
from betoken.gateway.settings import GatewaySettings

_MAX_HEAD_BYTES = 64 << 10
_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class _BoundedProtocol(HttpToolsProtocol):  # type: ignore[misc,unused-ignore]
    _idle: IdleConnections
    _head_timeout_s: float
    _max_unread_s: float
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _address = ""
    _is_in_head = False
    _num_head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self._settle()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._num_head_bytes += len(data)  # 0 again if a head begins in this part, which may end a body as well
        super().data_received(data)
        too_large = self._is_in_head and self._num_head_bytes > _MAX_HEAD_BYTES
        if too_large and not self.transport.is_closing():
            self._refuse(Failure(431, f"the head of a request must have at most {_MAX_HEAD_BYTES} bytes"))
        self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._wait_for_reader()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for_head(is_idle=False)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Failure(400, msg))

    def _refuse(self, failure: Failure) -> None:
        body = json.dumps(failure.body()).encode()
        head = f"HTTP/1.1 {failure.status} {_REASONS[failure.status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
        self._wait_for_reader()

    def _settle(self) -> None:
        """Start or stop the wait for a head, after anything that may begin or end a request."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        self._wait_for_head(is_idle=not is_answering and not self.transport.is_closing())

    def _wait_for_head(self, *, is_idle: bool) -> None:
        if is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self.transport.abort)
            self._idle.add(self._address, self.transport)
        elif not is_idle and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
            self._idle.remove(self._address, self.transport)

    def _wait_for_reader(self) -> None:
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(self._max_unread_s, self.transport.abort)


def bounded_protocol(settings: GatewaySettings) -> type[HttpToolsProtocol]:
    """Return the protocol class for uvicorn."""

    class Protocol(_BoundedProtocol):
        _idle = IdleConnections(settings.max_idle_connections)
        _head_timeout_s, _max_unread_s = settings.body_timeout_s, settings.max_unread_s

    return Protocol
