"""One client call through the blocking and the asyncio client."""

import asyncio
import contextlib
from typing import Any

from betoken.client import AsyncClient, Client, RetryPolicy

FAST = RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.002)


class SyncRunner:
    """Drives the blocking client off the test's event loop."""

    async def pieces(self, address: str, prompt: Any, stop_after: int | None = None, **options: Any) -> list[Any]:
        return await asyncio.to_thread(self._pieces, address, prompt, stop_after, options)

    def _pieces(self, address: str, prompt: Any, stop_after: int | None, options: dict[str, Any]) -> list[Any]:
        pieces = []
        with Client(address, retry=options.pop("retry", FAST)) as client:
            generation = client.generate(prompt, **options)
            for piece in generation:
                pieces.append(piece)
                if len(pieces) == stop_after:
                    break
            if stop_after is not None:
                return pieces  # the answer object is still alive here: leaving the loop alone must have cancelled
        return pieces

    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        def run() -> Any:
            own = {"retry": options.pop("retry", FAST)} | options.pop("client_options", {})
            with Client(address, **own) as client:
                return getattr(client, method)(*args, **options)

        return await asyncio.to_thread(run)


class AsyncRunner:
    """Drives the asyncio client."""

    async def pieces(self, address: str, prompt: Any, stop_after: int | None = None, **options: Any) -> list[Any]:
        pieces = []
        async with AsyncClient(address, retry=options.pop("retry", FAST)) as client:
            generation = client.generate(prompt, **options)
            async for piece in generation:
                pieces.append(piece)
                if len(pieces) == stop_after:
                    break
            return pieces

    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        own = {"retry": options.pop("retry", FAST)} | options.pop("client_options", {})
        async with AsyncClient(address, **own) as client:
            return await getattr(client, method)(*args, **options)


async def swallowed() -> None:
    """The task was cancelled once, and went on."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert task.cancelling() > 0
