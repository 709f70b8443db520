"""Runs work of the router's own in an `AioPool`, so that a burst (every sequence of a dead worker) stays bounded.

The pool alone would let the work run on when its caller is cancelled; this does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncio_pool import AioPool

Result = TypeVar("Result")


async def run_bounded(
    pool: AioPool, work: Coroutine[Any, Any, Result], discard: Callable[[Result], None] = lambda result: None
) -> Result:
    """The result of `work`, once the pool had room for it; cancelled with its caller.

    `discard` gets a result that its caller, cancelled in the very turn in which it came, does not.
    """
    future: asyncio.Future[Result] = await pool.spawn(work)
    try:
        return await asyncio.shield(future)  # a bare await would mark the future done and leave the work running
    except BaseException:
        if not future.done():
            await pool.cancel(future)
        elif not future.cancelled() and future.exception() is None:
            discard(future.result())
        raise
