"""Bounds the number of values of a JSON text while it arrives, so that parsing it takes bounded time and memory.

Counts brackets and commas outside strings; does not check the syntax.
"""

from __future__ import annotations

MAX_VALUES = 1 << 20
MAX_CONTAINERS = 1 << 17


class JsonStructure:
    """Number of values and containers (lists and objects) of the text so far."""

    def __init__(self) -> None:
        self.num_values = 0
        self.num_containers = 0
        self._is_in_string = False
        self._held = b""

    def feed(self, data: bytes) -> None:
        """Count the next part of the text."""
        data = self._held + data
        num_backslashes = len(data) - len(data.rstrip(b"\\"))
        end = len(data) - num_backslashes % 2  # an escape may continue in the next part
        self._held = data[end:]
        parts = data[:end].replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[int(self._is_in_string) :: 2])
        self._is_in_string ^= len(parts) % 2 == 0
        self.num_containers += outside.count(b"[") + outside.count(b"{")
        self.num_values += outside.count(b",")

    @property
    def excess(self) -> str:
        """The exceeded limit; empty if none is."""
        if self.num_containers > MAX_CONTAINERS:
            return f"the body must have at most {MAX_CONTAINERS} lists and objects"
        return f"the body must have at most {MAX_VALUES} values" if self.num_values > MAX_VALUES else ""
