"""Hands a link's answers to the one coroutine that waits for them.

A queue for one reader without locks or tasks: a round waits twice, so this is the router's hottest path.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items in order of arrival; after `fail`, what arrived before is still delivered, then the error."""

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Append an item."""
        self._items.append(item)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Nothing more will come; the first error stays."""
        if self._error is None:
            self._error = error
        self._wake()

    async def get(self, timeout_s: float) -> Item:
        """The oldest item.

        Raises:
            TimeoutError: nothing came in time.
            Exception: the one given to `fail`, once all items are taken.
        """
        if not self._items:
            if self._error is not None:
                raise self._error
            await self._wait(timeout_s)
            if not self._items:
                assert self._error is not None
                raise self._error
        return self._items.popleft()

    async def _wait(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _expire, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
