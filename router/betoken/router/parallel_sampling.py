"""Parallel sampling: the requests of all `n` answers of one request, and tasks that end together.

Knows nothing of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from betoken.common.seeds import derived_seed
from betoken.router.request.generation import GenerationRequest
from betoken.v1.types_pb2 import SamplingParams


def requests_of(first: GenerationRequest, num_answers: int) -> list[GenerationRequest]:
    """The requests of all answers: `first`, and further ones, each with its own seed and id."""
    requests = [first]
    for index in range(1, num_answers):
        sampling = SamplingParams()
        sampling.CopyFrom(first.sampling)
        sampling.seed = derived_seed(first.sampling.seed, index)
        requests.append(
            replace(
                first,
                request_id=f"{first.request_id}.{index}",
                sampling=sampling,
                num_received_logprobs=first.num_prompt_logprobs,
                is_further=True,
            )
        )
    return requests


async def run_together(works: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Run all to their ends; the first error cancels the others and is raised."""
    siblings = _Siblings()
    async with asyncio.TaskGroup() as tasks:
        siblings.tasks += [tasks.create_task(siblings.run(work)) for work in works]
    if siblings.error is not None:
        raise siblings.error


class _Siblings:
    """Tasks that end together."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.error: Exception | None = None

    async def run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as caught:  # raised by the caller: a TaskGroup would wrap it
            if self.error is None:
                self.error = caught
                for task in self.tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
