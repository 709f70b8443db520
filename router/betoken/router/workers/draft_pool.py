"""The draft workers: which host what, which work, and which is least loaded.

A worker gets sequences only while its circuit is closed, and its circuit closes only after a probe of the router's own,
so that no client waits for a worker that hangs. Knows nothing of verification results or text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from asyncio_pool import AioPool

from betoken.router.workers.circuit_breaker import BreakerOptions, CircuitBreaker
from betoken.router.workers.draft_worker import DraftWorker
from betoken.router.workers.handshakes import Handshakes
from betoken.router.workers.worker import WorkerOptions
from betoken.router.workers.worker_pool import WorkerPool
from betoken.rpc.link import LinkState


class DraftPool(WorkerPool[DraftWorker]):
    """All draft workers of this router."""

    def __init__(
        self,
        addresses: Sequence[str],
        options: WorkerOptions,
        probe_timeout_s: float,
        breaker: BreakerOptions,
        handshakes: Handshakes,
    ) -> None:
        """Subscribers are called after each worker that connected."""
        check = handshakes.check_draft
        super().__init__(
            DraftWorker(address, options, CircuitBreaker(*breaker), check, self._notify) for address in addresses
        )
        self._probe_timeout_s = probe_timeout_s

    @property
    def has_met_all(self) -> bool:
        """Whether each worker has reported its drafters, even if it has disconnected since, or was rejected."""
        links = [worker.link for worker in self.workers]
        return all(link.hello is not None or link.state is LinkState.REFUSED for link in links)

    def least_loaded(self, drafter: str, without: Collection[DraftWorker] = ()) -> DraftWorker | None:
        """The working draft worker with most room that hosts `drafter` (empty: any); None without one.

        `without`: workers not to be taken.
        """
        fitting = [
            worker
            for worker in self.workers
            if worker.is_ready
            and worker.has_room
            and worker not in without
            and (not drafter or drafter in worker.drafters)
        ]
        return min(fitting, key=lambda worker: worker.load_factor, default=None)

    async def run(self, probes: AioPool) -> None:
        """Keep all links and circuits until cancelled; `probes` bounds how many workers are probed at once."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(worker.link.run())
                tasks.create_task(worker.keep_probed(probes, self._probe_timeout_s))
