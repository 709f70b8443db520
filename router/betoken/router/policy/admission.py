"""Admits requests: so many at once, so many waiting, so long; everything else is refused before any work is done.

First come, first served. Knows nothing of what an admitted request does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from betoken.common.errors import ResourceExhaustedError, UnavailableError

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 0.1, 60.0


class Admission:
    """A bounded queue in front of a bounded number of slots."""

    def __init__(
        self,
        max_concurrency: int,
        max_queue: int,
        timeout_s: float,
        capacity: Callable[[], int],
        no_worker: Callable[[float], UnavailableError],
    ) -> None:
        """`capacity`: requests the workers can hold right now; `capacity_changed` must follow its changes.

        `no_worker`: what to say after so many seconds without any capacity.
        """
        self._max_concurrency = max_concurrency
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._capacity = capacity
        self._no_worker = no_worker
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._mean_service_s = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        """Requests admitted and not finished."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, timeout_s: float = math.inf) -> AsyncIterator[int]:
        """Hold a slot; the value is the time spent waiting for it, nanoseconds.

        `timeout_s`: longest wait where the request leaves less than others may wait.

        Raises:
            ResourceExhaustedError: the queue is full, or the wait was too long; carries when to retry.
            UnavailableError: the wait was too long because no worker is ready.
        """
        asked_ns = time.perf_counter_ns()
        if self._waiting or self.num_running >= self._limit():
            await self._wait(min(timeout_s, self._timeout_s))
        else:
            self.num_running += 1
        admitted_ns = time.perf_counter_ns()
        try:
            yield admitted_ns - asked_ns
        finally:
            self.num_running -= 1
            self._mean_service_s += 0.1 * ((time.perf_counter_ns() - admitted_ns) / 1e9 - self._mean_service_s)
            self.capacity_changed()

    async def wait_idle(self) -> None:
        """Return once nothing runs and nothing waits."""
        while self.num_running or self._waiting:
            self._idle.clear()
            await self._idle.wait()

    def capacity_changed(self) -> None:
        """Admit as many waiting requests as there is room for."""
        while self._waiting and self.num_running < self._limit():
            future = self._waiting.popleft()
            if not future.done():
                self.num_running += 1  # on behalf of the waiter, so that nobody slips in between
                future.set_result(None)
        if not self.num_running and not self._waiting:
            self._idle.set()

    async def _wait(self, timeout_s: float) -> None:
        if len(self._waiting) >= self._max_queue:
            raise ResourceExhaustedError(
                f"{self.num_running} requests run, {len(self._waiting)} wait: the queue of {self._max_queue} is full",
                retry_after_s=self._retry_after_s(),
            )
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return  # admitted in the same turn
            raise self._too_late(timeout_s) from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.num_running -= 1
                self.capacity_changed()
            raise
        finally:
            if future in self._waiting:
                self._waiting.remove(future)
                self.capacity_changed()

    def _too_late(self, waited_s: float) -> ResourceExhaustedError | UnavailableError:
        if self._capacity() <= 0:
            return self._no_worker(waited_s)
        return ResourceExhaustedError(
            f"not admitted within {waited_s:.3g} s: {self.num_running} requests run",
            retry_after_s=self._retry_after_s(),
        )

    def _limit(self) -> int:
        return min(self._max_concurrency, self._capacity())

    def _retry_after_s(self) -> float:
        """Expected time until a request that comes now would start."""
        expected_s = self._mean_service_s * (len(self._waiting) + 1) / max(1, self._limit())
        return min(_MAX_RETRY_AFTER_S, max(_MIN_RETRY_AFTER_S, expected_s))
