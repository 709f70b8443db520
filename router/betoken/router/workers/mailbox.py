"""Hands a link's answers to the one coroutine that waits for them.

A queue for one reader without locks, tasks or timers: a round waits twice, so this is the router's hottest
path. Timeouts are kept by one `Patience` for all mailboxes, exact to its tick.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")

_TICK_S = 0.02
_MAX_ITEMS = 1024
"""Most waiting items, many times what was ever asked for. Later ones are dropped; the first ones show the fault."""


class Patience:
    """Ends overdue waits, with one timer for all: setting and cancelling one per wait costs more than the wait."""

    def __init__(self) -> None:
        self._waits: list[tuple[asyncio.Future[None], float]] = []
        """Waiters with their deadlines (`time.monotonic`); what is over stays until the next tick."""
        self._is_ticking = False

    def watch(self, waiter: asyncio.Future[None], timeout_s: float) -> None:
        """Give `waiter` a `TimeoutError` once `timeout_s` have passed, unless it is done before."""
        self._waits.append((waiter, time.monotonic() + timeout_s))
        if not self._is_ticking:
            self._is_ticking = True
            waiter.get_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        self._waits = [wait for wait in self._waits if not wait[0].done()]
        for waiter, deadline in self._waits:
            if deadline <= now:
                waiter.set_exception(TimeoutError())
        self._is_ticking = bool(self._waits)
        if self._is_ticking:
            asyncio.get_running_loop().call_later(_TICK_S, self._tick)


class Mailbox(Generic[Item]):
    """Items in order of arrival; after `fail`, what arrived before is still delivered, then the error."""

    __slots__ = ("_error", "_items", "_patience", "_waiter")

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._items: deque[Item] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether `get` would wait."""
        return not self._items and self._error is None

    def put(self, item: Item) -> None:
        """Append an item, unless a worker floods."""
        if len(self._items) < _MAX_ITEMS:
            self._items.append(item)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """No more items come; the first error stays."""
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self, timeout_s: float) -> Item:
        """The oldest item.

        Raises:
            TimeoutError: nothing came in time.
            Exception: the one given to `fail`, once all items are taken.
        """
        if self.is_empty:
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            self._patience.watch(waiter, timeout_s)
            await waiter
        if self._items:
            return self._items.popleft()
        assert self._error is not None
        raise self._error
