"""Bounds the time in which an answer may stay unread: a client with a closed HTTP/2 window would hold it indefinitely.

Relies on `grpc.aio`, whose `write` returns once the message has been sent.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

from betoken.common.errors import UnavailableError


class ReplyWriter:
    """The messages of one call. One timer for all: `asyncio.timeout` would cost each as much as deciding its tokens."""

    def __init__(self, context: Any, max_unread_s: float) -> None:
        self._context = context
        self._max_unread_s = max_unread_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[Any] | None = None
        self._since_s: float | None = None
        """When the write under way began, on the event loop's clock."""
        self._is_overdue = False
        self._is_begun = False
        self._timer = self._loop.call_later(max_unread_s, self._check)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    async def write(self, message: Any) -> None:
        """Send a message.

        Raises:
            UnavailableError: the client has not read for too long; it can still be sent that status.
        """
        if not self._is_begun:
            # Apart from the message, or a status after a first message that never left could not be sent.
            self._is_begun = True
            await self._context.send_initial_metadata(())
        self._task = task = asyncio.current_task()
        self._since_s = self._loop.time()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            if self._is_overdue and task is not None and not task.uncancel():
                raise UnavailableError(f"the answer lay unread for {self._max_unread_s:g} s") from None
            raise
        finally:
            self._since_s = None

    def _check(self) -> None:
        left_s = self._max_unread_s
        if self._since_s is not None:
            left_s += self._since_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check)
        elif self._task is not None:
            self._is_overdue = True
            self._task.cancel()
