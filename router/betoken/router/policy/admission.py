"""Admits requests within limits on running, waiting and time; all others are refused before any work is done.

Fair between tenants, and within a tenant first come, first served. Knows nothing of what an admitted request does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from betoken.common.errors import ResourceExhaustedError, UnavailableError
from betoken.router.policy.account import Account
from betoken.router.policy.fair_queue import FairQueue, Place

_MIN_RETRY_AFTER_S, _MAX_RETRY_AFTER_S = 0.1, 60.0


class Workers(Protocol):
    """The verify workers, as admission needs them."""

    @property
    def capacity(self) -> int:
        """Requests that they can hold right now."""
        ...

    def none_ready(self, waited_s: float) -> UnavailableError:
        """The error after `waited_s` seconds without any capacity."""
        ...


class Admission:
    """A bounded queue in front of a bounded number of slots."""

    def __init__(
        self,
        max_concurrency: int,
        max_queue: int,
        timeout_s: float,
        workers: Workers,
    ) -> None:
        """`capacity_changed` must follow each change of the capacity of `workers`."""
        self._max_concurrency = max_concurrency
        self._max_queue = max_queue
        self._timeout_s = timeout_s
        self._workers = workers
        self._queue = FairQueue()
        self._mean_service_s = 1.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_running = 0
        """Requests admitted and not finished."""

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @asynccontextmanager
    async def slot(
        self, timeout_s: float = math.inf, tenant: str = "", accounts: Sequence[Account] = ()
    ) -> AsyncIterator[int]:
        """Hold a slot; the value is the time spent waiting for it, nanoseconds.

        `timeout_s`: maximum wait if the request allows less than others. `tenant`: turns are shared between
            tenants. `accounts`: further limits that apply.

        Raises:
            ResourceExhaustedError: the queue is full, or the wait was too long; carries when to retry.
            UnavailableError: the wait was too long because no worker is ready.
        """
        asked_ns = time.perf_counter_ns()
        place = Place(tenant, accounts)
        self.capacity_changed()  # so waiting requests still lack room, or wait for their own account
        if self.num_running < self._limit() and place.can_run:
            self._start(place)
        else:
            await self._wait(place, min(timeout_s, self._timeout_s))
        admitted_ns = time.perf_counter_ns()
        try:
            yield admitted_ns - asked_ns
        finally:
            self._mean_service_s += 0.1 * ((time.perf_counter_ns() - admitted_ns) / 1e9 - self._mean_service_s)
            self._end(place)

    async def wait_idle(self) -> None:
        """Return once nothing runs and nothing waits."""
        while self.num_running or len(self._queue):
            self._idle.clear()
            await self._idle.wait()

    def capacity_changed(self) -> None:
        """Admit as many waiting requests as there is room for."""
        while self.num_running < self._limit() and (place := self._queue.next()) is not None:
            if place.turn.done():  # cancelled, and about to leave
                self._queue.remove(place)
                continue
            self._start(place)  # on behalf of the waiter, so that no other request takes its place
            place.turn.set_result(None)
        if not self.num_running and not len(self._queue):
            self._idle.set()

    def _start(self, place: Place) -> None:
        self._queue.start(place)
        self.num_running += 1

    def _end(self, place: Place) -> None:
        self._queue.end(place)
        self.num_running -= 1
        self.capacity_changed()

    async def _wait(self, place: Place, timeout_s: float) -> None:
        self._queue_up(place)
        try:
            async with asyncio.timeout(timeout_s):
                await place.turn
        except TimeoutError:
            if not place.is_admitted:  # which may be in the same turn
                raise self._too_late(timeout_s) from None
        except asyncio.CancelledError:
            if place.is_admitted:
                self._end(place)
            raise
        finally:
            if not place.is_admitted:
                self._queue.remove(place)
                self.capacity_changed()

    def _queue_up(self, place: Place) -> None:
        for account in place.accounts:
            account.check_queue(self._retry_after_s())
        if len(self._queue) >= self._max_queue:
            full = ResourceExhaustedError(
                f"{self.num_running} requests run, {len(self._queue)} wait: the queue of {self._max_queue} is full",
                retry_after_s=self._retry_after_s(),
            )
            if (last := self._queue.gives_way_to(place)) is None:
                raise full
            self._queue.remove(last)
            if not last.turn.done():
                last.turn.set_exception(full)
                last.turn.exception()  # seen: a waiter that is cancelled meanwhile never looks
        self._queue.add(place)

    def _too_late(self, waited_s: float) -> ResourceExhaustedError | UnavailableError:
        if self._workers.capacity <= 0:
            return self._workers.none_ready(waited_s)
        return ResourceExhaustedError(
            f"not admitted within {waited_s:.3g} s: {self.num_running} requests run",
            retry_after_s=self._retry_after_s(),
        )

    def _limit(self) -> int:
        return min(self._max_concurrency, self._workers.capacity)

    def _retry_after_s(self) -> float:
        """Expected time until a request that comes now would start."""
        expected_s = self._mean_service_s * (len(self._queue) + 1) / max(1, self._limit())
        return min(_MAX_RETRY_AFTER_S, max(_MIN_RETRY_AFTER_S, expected_s))
