"""Waits within a task: attribute a cancellation to its origin, and wait with a bound.

Knows no calls.
"""

from __future__ import annotations

import asyncio


async def num_cancels_so_far(last: int = 0) -> int:
    """How often this task has been cancelled and went on all the same; `last` is what it was before.

    A requested cancellation that is still pending is delivered here, distinguished from a cancellation of the call.
    """
    if num_cancels() != last:
        await asyncio.sleep(0)
    return num_cancels()


def num_cancels() -> int:
    """How often this task has been cancelled."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


async def pause(event: asyncio.Event, timeout_s: float) -> None:
    """Sleeps, but not longer than until `event`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
