"""All workers of one kind: their links, and what their drafters are called.

Knows neither sessions nor placement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from betoken.router.workers.worker import Worker
from betoken.v1.types_pb2 import SourceInfo

WorkerT = TypeVar("WorkerT", bound=Worker[Any])


class WorkerPool(Generic[WorkerT]):
    """The workers that one router was given. Subclasses place sequences."""

    def __init__(self, workers: Iterable[WorkerT]) -> None:
        self.workers: Sequence[WorkerT] = list(workers)
        self._listeners: list[Callable[[], None]] = []

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change that a subclass reports."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    @property
    def known_drafters(self) -> list[str]:
        """Names of drafters that any worker this router has met hosts or has attached, in order of the workers."""
        return list(dict.fromkeys(name for worker in self.workers for name in worker.drafters))

    @property
    def predicting_drafters(self) -> list[str]:
        """Names of drafters that look up predictions, of every worker this router has met."""
        hellos = (worker.link.hello for worker in self.workers)
        return [name for hello in hellos if hello is not None for name in hello.predicting_drafters]

    @property
    def ready_drafters(self) -> list[str]:
        """Names that can be had right now."""
        return list(dict.fromkeys(name for worker in self.workers if worker.is_ready for name in worker.drafters))

    @property
    def sources(self) -> list[SourceInfo]:
        """The sources of draft tokens, of every worker this router has met."""
        return [source for worker in self.workers for source in worker.sources]

    async def close(self) -> None:
        """Drain and close all links."""
        await asyncio.gather(*(worker.link.close() for worker in self.workers))
