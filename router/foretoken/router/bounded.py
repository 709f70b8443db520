"""Runs work of the router's own in an `AioPool`, so that a burst (every sequence of a dead worker) stays bounded.

The pool alone would let the work run on when its caller is cancelled; this does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from asyncio_pool import AioPool

Result = TypeVar("Result")


async def run_bounded(pool: AioPool, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, once the pool had room for it; cancelled with its caller."""
    future: asyncio.Future[Result] = await pool.spawn(work)
    try:
        return await asyncio.shield(future)  # a bare await would mark the future done and leave the work running
    finally:
        if not future.done():
            await pool.cancel(future)
