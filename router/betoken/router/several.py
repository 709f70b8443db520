"""Several answers of one request: the others begin once the first has computed the prompt, and find its KV.

Knows the core's events; nothing of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeAlias

from betoken.router.round.events import Event, Finished, Tokens

Emit: TypeAlias = Callable[[Event], Awaitable[None]]


async def several(
    first: Callable[[Emit], Coroutine[Any, Any, None]],
    further: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    emit: Emit,
) -> None:
    """All answers to their ends; the first error ends the others.

    Args:
        first: runs the first answer, whose events go to what it is given.
        further: run the others.
        emit: gets the first one's events.
    """
    is_computed = asyncio.Event()
    error: Exception | None = None

    async def emit_first(event: Event) -> None:
        await emit(event)
        if isinstance(event, Tokens | Finished):
            is_computed.set()

    async def guarded(work: Coroutine[Any, Any, None], *, waits: bool) -> None:
        nonlocal error
        try:
            if waits:
                await is_computed.wait()
            await work
        except Exception as caught:  # raised below: a TaskGroup would wrap it
            if error is None:
                error = caught
                for task in running:
                    if task is not asyncio.current_task():
                        task.cancel()
        finally:
            work.close()

    running: list[asyncio.Task[None]] = []
    async with asyncio.TaskGroup() as tasks:
        running.append(tasks.create_task(guarded(first(emit_first), waits=False)))
        running.extend(tasks.create_task(guarded(answer(), waits=True)) for answer in further)
    if error is not None:
        raise error
