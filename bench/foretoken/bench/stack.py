"""The three services as local processes, with a connected client: what benchmarks and end-to-end tests run on.

The verify worker may use all cores; the draft worker takes one thread, because its model is small.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from foretoken.bench.prompts import Prompt
from foretoken.bench.service_process import ServiceProcess
from foretoken.client import AsyncClient

START_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class StackConfig:
    """How to start the services; None leaves an option at the service's default."""

    target: str
    draft: str | None
    dtype: str = "bfloat16"
    compile: str = "auto"
    verify_threads: int | None = None
    draft_threads: int | None = 1
    num_pages: int | None = None
    """KV pages of the verify worker."""
    router_arguments: Sequence[str] = ()
    """More options of the router."""
    verify_arguments: Sequence[str] = ()
    """More options of the verify worker."""

    def verify_command(self) -> list[str]:
        """Options of the verify worker."""
        options = {"model": self.target, "dtype": self.dtype, "compile": self.compile}
        return [*_flags(options | {"threads": self.verify_threads, "num-pages": self.num_pages}), *self.verify_arguments]

    def draft_command(self) -> list[str]:
        """Options of the draft worker; without a draft model it hosts n-grams alone."""
        options = {"model": self.draft, "drafters": "model,ngram" if self.draft else "ngram"}
        return _flags(options | {"dtype": self.dtype, "compile": self.compile, "threads": self.draft_threads})


class Stack:
    """Running services; an async context manager."""

    def __init__(self, config: StackConfig) -> None:
        self._config = config
        self.verify_worker = ServiceProcess("foretoken.verify_worker", config.verify_command())
        self.draft_worker = ServiceProcess("foretoken.draft_worker", config.draft_command())
        self.router: ServiceProcess
        self.client: AsyncClient
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as exits:
            for worker in (self.verify_worker, self.draft_worker):
                exits.push_async_callback(worker.stop)
                worker.launch()
            for worker in (self.verify_worker, self.draft_worker):
                await worker.wait_until_ready(START_TIMEOUT_S)
            workers = {"verify": self.verify_worker.address, "draft": self.draft_worker.address}
            options = _flags(workers | {"tokenizer": self._config.target})
            self.router = ServiceProcess("foretoken.router", [*options, *self._config.router_arguments])
            exits.push_async_callback(self.router.stop)
            self.router.launch()
            await self.router.wait_until_ready(START_TIMEOUT_S)
            self.client = await exits.enter_async_context(AsyncClient(self.router.address))
            await self.wait_until_connected()
            self._exits = exits.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    async def wait_until_connected(self) -> None:
        """Wait until the router has both workers ready.

        Raises:
            TimeoutError: it has not, within the start time-out.
        """
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                info = await self.client.model_info()
                if all(worker.state == "ready" for worker in (*info.verify_workers, *info.draft_workers)):
                    return
                await asyncio.sleep(0.05)

    async def fitting(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Prompt]:
        """The prompts whose answers fit the context; the others are named on stdout."""
        max_context = (await self.client.model_info()).max_context
        fitting = []
        for prompt in prompts:
            num_tokens = len(await self.client.tokenize(prompt.text))
            if num_tokens + max_new_tokens <= max_context:
                fitting.append(prompt)
            else:
                print(f"prompt {prompt.index} left out: {num_tokens} + {max_new_tokens} tokens exceed {max_context}")
        return fitting

    async def all_pages_free(self) -> bool:
        """Whether every worker that has KV pages reports all of them free within a few seconds of idleness."""
        give_up_at = time.monotonic() + IDLE_TIMEOUT_S
        while True:
            info = await self.client.model_info()
            if all(worker.free_pages == worker.total_pages for worker in (*info.verify_workers, *info.draft_workers)):
                return True
            if time.monotonic() > give_up_at:
                return False
            await asyncio.sleep(0.05)

    async def kill_draft_worker(self) -> None:
        """SIGKILL."""
        await self.draft_worker.kill()

    async def restart_draft_worker(self) -> None:
        """Start it again under the same address; returns when it serves, the router finds it by itself."""
        self.draft_worker.launch()
        await self.draft_worker.wait_until_ready(START_TIMEOUT_S)

    async def freeze_draft_worker(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        self.draft_worker.send_signal(signal.SIGSTOP)

    async def thaw_draft_worker(self) -> None:
        """SIGCONT: it goes on, with everything it had received."""
        self.draft_worker.send_signal(signal.SIGCONT)


def _flags(options: dict[str, str | int | None]) -> list[str]:
    return [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
