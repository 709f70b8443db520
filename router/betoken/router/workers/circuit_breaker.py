"""Stops asking a worker that keeps failing, and says when to try it again.

Closed: work is given. Open: none is, until a probe succeeds. Knows neither workers nor sequences.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple


class BreakerOptions(NamedTuple):
    """Arguments of a `CircuitBreaker`."""

    max_failures: int
    min_pause_s: float
    max_pause_s: float


class CircuitBreaker:
    """Counts consecutive failures; open from `max_failures` on, and until the first success of a probe."""

    def __init__(self, max_failures: int, min_pause_s: float, max_pause_s: float) -> None:
        self._max_failures = max_failures
        self._min_pause_s = min_pause_s
        self._max_pause_s = max_pause_s
        self._num_failures = 0
        self._num_failed_probes = 0
        self._opened = asyncio.Event()
        self._opened.set()  # a worker has to show once that it works
        self._was_reset = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        """Whether work may be given."""
        return not self._opened.is_set()

    @property
    def pause_s(self) -> float:
        """Time to wait before the next probe; doubles with each failed one, none before the first."""
        if self._num_failed_probes == 0:
            return 0.0
        return min(self._max_pause_s, self._min_pause_s * 2.0 ** min(30, self._num_failed_probes - 1))

    def record_success(self) -> None:
        """Work was done in time."""
        self._num_failures = 0

    def record_failure(self) -> None:
        """Work failed or was late; enough of it in a row opens the circuit."""
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self.trip()

    def trip(self) -> None:
        """Open the circuit at once: the worker gives no sign of work."""
        if self.is_closed:
            self._num_failed_probes = 1
            self._opened.set()

    def record_probe(self, succeeded: bool) -> None:
        """A probe's outcome closes the circuit or lengthens the pause."""
        if succeeded:
            self._num_failures = self._num_failed_probes = 0
            self._opened.clear()
        else:
            self._num_failed_probes += 1

    def reset(self) -> None:
        """The worker is a new one: it may be probed at once."""
        self._num_failures = self._num_failed_probes = 0
        self._opened.set()
        self._was_reset.set()

    async def wait_open(self) -> None:
        """Return once the circuit is open."""
        await self._opened.wait()

    async def wait_pause(self) -> None:
        """Return once the pause before the next probe is over; a reset ends it."""
        self._was_reset.clear()
        try:
            async with asyncio.timeout(self.pause_s):
                await self._was_reset.wait()
        except TimeoutError:
            pass
