"""A client of a few HTTP/2 frames: what a stranger may send and no gRPC library would.

Knows frames and requests; answers pings and settings, and opens no window by default.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from types import TracebackType
from typing import Any, Self

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4


class RawConnection:
    """One connection; streams are numbered in order of their opening."""

    def __init__(self, address: str, window: int = 0) -> None:
        """`window`: bytes of each stream that the server may send unasked."""
        self._host, _, self._port = address.rpartition(":")
        self._window = window
        self._next_stream = 1
        self.ended: set[int] = set()
        """Streams that the server has ended or reset."""
        self.answered: set[int] = set()
        """Streams that the server has sent anything on."""
        self.headers: dict[int, bytes] = defaultdict(bytes)
        """Received headers and trailers of each stream, in gRPC's encoding."""
        self._data: dict[int, bytes] = defaultdict(bytes)
        self.reset: set[int] = set()
        """Streams that the server has reset."""
        self.is_closed = False
        """Whether the server has ended the connection."""

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, self._window))
        self._reading = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        self._reading.cancel()
        self._writer.close()

    def call(self, method: str, message: Any = None) -> int:
        """Open a stream with a request's headers, and send `message`, the only one, unless it is None."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        headers = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "test"}
        headers |= {"te": "trailers", "content-type": "application/grpc"}
        self._send(_HEADERS, _END_HEADERS, stream, b"".join(map(_literal, headers, headers.values())))
        if message is not None:
            self.send(stream, message)
        return stream

    def send(self, stream: int, message: Any) -> None:
        """Send a stream's only message."""
        data = message.SerializeToString()
        self._send(_DATA, _END_STREAM, stream, struct.pack(">BI", 0, len(data)) + data)

    def cancel(self, stream: int) -> None:
        """Reset a stream."""
        self._send(_RST_STREAM, 0, stream, struct.pack(">I", 8))

    def open_window(self, stream: int, num_bytes: int = 1 << 20) -> None:
        """Let the server send more."""
        for each in (0, stream):
            self._send(_WINDOW_UPDATE, 0, each, struct.pack(">I", num_bytes))

    def messages(self, stream: int) -> list[bytes]:
        """The messages that have come whole."""
        data, position, found = self._data[stream], 0, []
        while (start := position + 5) <= len(data):
            position = start + int.from_bytes(data[position + 1 : start], "big")
            found += [data[start:position]] if position <= len(data) else []
        return found

    async def drain(self) -> None:
        """Return once the frames so far are with the kernel."""
        await self._writer.drain()

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._writer.write(struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream))
        self._writer.write(payload)

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                kind, flags = head[3], head[4]
                stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                if kind in (_SETTINGS, _PING) and not flags & _ACK:
                    self._send(kind, _ACK, 0, payload if kind == _PING else b"")
                if kind in (_DATA, _HEADERS):
                    self.answered.add(stream)
                    (self._data if kind == _DATA else self.headers)[stream] += payload
                if kind == _RST_STREAM:
                    self.reset.add(stream)
                if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                    self.ended.add(stream)
        except (asyncio.IncompleteReadError, OSError):
            self.is_closed = True


def _literal(name: str, value: str) -> bytes:
    """A header field, neither compressed nor indexed (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
