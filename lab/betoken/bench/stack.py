"""Local services with a connected asyncio client: what benchmarks and end-to-end tests run on.

Starting and stopping is `betoken.cli.local_services`; this adds what a benchmark asks of running services.
"""

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TextIO

from betoken.bench.prompts import Prompt
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.client import AsyncClient, RetryPolicy

IDLE_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.05


class Stack:
    """Running services; an async context manager."""

    def __init__(self, config: LocalServicesConfig) -> None:
        self.services = LocalServices(config)
        self.client: AsyncClient

    async def __aenter__(self) -> Self:
        starting = asyncio.get_running_loop().run_in_executor(None, self.services.start)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            self.services.stop(grace_s=0.0)  # which the thread finds, and ends: of a cancellation it hears nothing
            await asyncio.gather(starting, return_exceptions=True)
            raise
        # A benchmark must see broken streams instead of resuming them.
        self.client = AsyncClient(self.services.address, retry=RetryPolicy(max_retries=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.client.close()
        finally:
            await asyncio.to_thread(self.services.stop)

    async def fitting(self, prompts: Sequence[Prompt], max_new_tokens: int, file: TextIO | None = None) -> list[Prompt]:
        """The prompts whose answers fit the context; the others are named in `file`, by default stdout."""
        max_context = (await self.client.model_info()).max_context
        fitting = []
        for prompt in prompts:
            num_tokens = len(await self.client.tokenize(prompt.text))
            if num_tokens + max_new_tokens <= max_context:
                fitting.append(prompt)
            else:
                excess = f"{num_tokens} + {max_new_tokens} tokens exceed {max_context}"
                print(f"prompt {prompt.index} left out: {excess}", file=file)
        return fitting

    async def all_pages_free(self, timeout_s: float = IDLE_TIMEOUT_S) -> bool:
        """Whether every worker reports all its KV pages free within `timeout_s` of idleness."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            info = await self.client.model_info()
            if all(worker.free_pages == worker.total_pages for worker in (*info.verify_workers, *info.draft_workers)):
                return True
            if time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(POLL_INTERVAL_S)

    async def num_preemptions(self) -> int:
        """Preemptions of all verify workers since their start."""
        return sum(worker.preemptions for worker in (await self.client.model_info()).verify_workers)

    async def kill_draft_worker(self) -> None:
        """End it as a crash would."""
        await asyncio.to_thread(self.services.kill, "draft")

    async def restart_draft_worker(self) -> None:
        """Start it again under the same address; returns when the router has found it."""
        await self._restart("draft")

    async def kill_first_verify_worker(self) -> None:
        """End the first of several as a crash would."""
        await asyncio.to_thread(self.services.kill, "verify-1")

    async def restart_first_verify_worker(self) -> None:
        """Start it again under the same address; returns when the router has found it."""
        await self._restart("verify-1")

    async def pause_draft_worker(self) -> None:
        """Hang it: it keeps its connections and answers nothing."""
        self.services.services["draft"].pause()

    async def resume_draft_worker(self) -> None:
        """Let it go on, with everything it had received."""
        self.services.services["draft"].resume()

    async def _restart(self, name: str) -> None:
        await asyncio.to_thread(self.services.restart, name)
        address = self.services.services[name].address
        async with asyncio.timeout(self.services.config.start_timeout_s):
            while True:
                if address in await self._connected():
                    return
                await asyncio.sleep(POLL_INTERVAL_S)

    async def _connected(self) -> set[str]:
        """Addresses of the workers that have a link to the router."""
        info = await self.client.model_info()
        workers = (*info.verify_workers, *info.draft_workers)
        return {worker.address for worker in workers if worker.state == "ready"}
