"""Bounds bodies that are still arriving, by number, bytes, address and rate.

If there are too many, the oldest body of the address that holds most is refused. Knows no requests and no sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

MIN_BYTES_PER_S = 1024
GRACE_S = 5.0
"""Time before the minimal rate applies, seconds."""


class IncompleteBodies:
    """The bodies of one process that are still arriving."""

    def __init__(self, max_bodies: int, max_bytes: int) -> None:
        self._max_bodies = max_bodies
        self._max_bytes = max_bytes
        self._by_address: dict[str, dict[IncompleteBody, None]] = {}  # the oldest first
        self.num_bodies = 0
        self.num_bytes = 0

    def begin(self, address: str, timeout_s: float) -> IncompleteBody:
        """Return the body of a new request, to be entered."""
        return IncompleteBody(self, address, timeout_s)

    def add(self, body: IncompleteBody) -> None:
        """Count a body; evict others if there are too many."""
        self._by_address.setdefault(body.address, {})[body] = None
        self.num_bodies += 1
        while self.num_bodies > self._max_bodies:
            self._evict(lambda bodies: len(bodies))

    def grow(self, body: IncompleteBody, num_bytes: int) -> None:
        """Count bytes of a body; evict the oldest if there are too many."""
        body.num_bytes += num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes and self.num_bodies:
            self._evict(lambda bodies: sum(held.num_bytes for held in bodies))

    def remove(self, body: IncompleteBody) -> None:
        """Forget a body; idempotent."""
        bodies = self._by_address.get(body.address, {})
        if body in bodies:
            del bodies[body]
            if not bodies:
                del self._by_address[body.address]
            self.num_bodies -= 1
            self.num_bytes -= body.num_bytes

    def _evict(self, size: Callable[[dict[IncompleteBody, None]], int]) -> None:
        largest = max(self._by_address.values(), key=size)
        oldest = next(iter(largest))
        self.remove(oldest)
        oldest.evict()


class IncompleteBody:
    """One body; ends its block with TimeoutError if it is evicted, late or slower than the minimal rate."""

    def __init__(self, bodies: IncompleteBodies, address: str, timeout_s: float) -> None:
        self.address = address
        self.num_bytes = 0
        self.is_evicted = False
        self._bodies = bodies
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        self._began_s = asyncio.get_running_loop().time()
        self._limit = asyncio.timeout_at(self._deadline())
        await self._limit.__aenter__()
        self._bodies.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bodies.remove(self)
        await self._limit.__aexit__(kind, error, trace)

    def received(self, num_bytes: int) -> None:
        """Count the next part."""
        if not self.is_evicted:
            self._bodies.grow(self, num_bytes)
        if not self.is_evicted:
            self._end_at(self._deadline())

    def evict(self) -> None:
        """End the wait for the rest."""
        self.is_evicted = True
        self._end_at(asyncio.get_running_loop().time())

    def _end_at(self, time_s: float) -> None:
        if not self._limit.expired():
            self._limit.reschedule(time_s)

    def _deadline(self) -> float:
        return self._began_s + min(self._timeout_s, GRACE_S + self.num_bytes / MIN_BYTES_PER_S)
