"""Bounds connections without a request in progress: the oldest of the address with most is closed for a new one.

Connections with a request in progress are bounded by the number of requests.
"""

from __future__ import annotations

import asyncio


class IdleConnections:
    """Connections of one server that wait for the head of a request."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._by_address: dict[str, dict[asyncio.Transport, None]] = {}  # the oldest first
        self.num_connections = 0

    def add(self, address: str, connection: asyncio.Transport) -> None:
        """Count a connection; abort others if there are too many."""
        self._by_address.setdefault(address, {})[connection] = None
        self.num_connections += 1
        while self.num_connections > self._max_connections:
            most, waiting = max(self._by_address.items(), key=lambda entry: len(entry[1]))
            oldest = next(iter(waiting))
            self.remove(most, oldest)
            oldest.abort()

    def remove(self, address: str, connection: asyncio.Transport) -> None:
        """Forget a connection; idempotent."""
        waiting = self._by_address.get(address, {})
        if connection in waiting:
            del waiting[connection]
            if not waiting:
                del self._by_address[address]
            self.num_connections -= 1
