"""uvicorn's HTTP protocol with bounds on how long and how large the head of a request may be, which it lacks.

A client that sends half a head would hold its connection for ever, one that never ends it the memory.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from betoken.gateway.errors import Failure

_MAX_HEAD_BYTES = 64 << 10


def patient_protocol(timeout_s: float) -> type[HttpToolsProtocol]:
    """The class for uvicorn, with a bound on the wait for a head."""

    class Protocol(HttpToolsProtocol):
        _patience: asyncio.TimerHandle | None = None
        _num_head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait_for_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._wait_for_head()

        def on_headers_complete(self) -> None:
            self._stop_waiting()
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._patience is not None:
                self._num_head_bytes += len(data)
                if self._num_head_bytes > _MAX_HEAD_BYTES:
                    self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            body = json.dumps(Failure(400, msg).body()).encode()
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        def _wait_for_head(self) -> None:
            if self._patience is None:
                self._num_head_bytes = 0
                self._patience = self.loop.call_later(timeout_s, self.transport.close)

        def _stop_waiting(self) -> None:
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None

    return Protocol
