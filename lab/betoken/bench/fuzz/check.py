"""Whether services are as they were before: an answer is the same, and nothing is held.

Knows the SDK only.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from betoken.client import AsyncClient

IDLE_TIMEOUT_S = 60.0
_POLL_S = 0.02
_NUM_TOKENS = 24


class LeftBehindError(Exception):
    """Services are not as they were."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """An answer from before, to be had again."""

    client: AsyncClient
    prompt: str
    output_ids: tuple[int, ...]

    @classmethod
    async def begin(cls, client: AsyncClient, prompt: str) -> HealthCheck:
        """A check that holds later answers to the one decoded plainly now."""
        completion = await client.complete(prompt, max_new_tokens=_NUM_TOKENS, temperature=0.8, seed=7, off=True)
        return cls(client, prompt, tuple(completion.output_ids))

    async def check(self) -> None:
        """Raises:
        LeftBehindError: the answer differs, with drafts or without, or a worker holds a sequence or a page when idle.
        """
        for off in (True, None):
            completion = await self.client.complete(
                self.prompt, max_new_tokens=_NUM_TOKENS, temperature=0.8, seed=7, off=off
            )
            if tuple(completion.output_ids) != self.output_ids:
                raise LeftBehindError(f"an answer became {completion.output_ids}, was {self.output_ids}")
        give_up_at = time.monotonic() + IDLE_TIMEOUT_S
        while held := await self._held():
            if time.monotonic() > give_up_at:
                raise LeftBehindError(f"held for {IDLE_TIMEOUT_S:g} s of idleness: {held}")
            await asyncio.sleep(_POLL_S)

    async def _held(self) -> str:
        info = await self.client.model_info()
        return "; ".join(
            f"{worker.role} worker: {worker.running} run, {worker.waiting} wait, {worker.free_pages} of"
            f" {worker.total_pages} pages free, {worker.state}"
            for worker in (*info.verify_workers, *info.draft_workers)
            if worker.running or worker.waiting or worker.free_pages != worker.total_pages or worker.state != "ready"
        )
