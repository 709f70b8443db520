"""Signals that end a service, as events of its event loop."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


class Stopping:
    """Signals as events: the first asks to stop, the second not to wait."""

    def __init__(self, stop: asyncio.Event | None) -> None:
        self.requested = stop or asyncio.Event()
        self._hurry = asyncio.Event()
        self._signals: list[signal.Signals] = []
        if stop is None:
            for signum in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(signum, self.ask)
                self._signals.append(signum)

    def ask(self) -> None:
        """The effect of a signal."""
        if self.requested.is_set():
            self._hurry.set()
        self.requested.set()

    async def unless_hurried(self, work: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(work)
            hurried = tasks.create_task(self._hurry.wait())
            await asyncio.wait({working, hurried}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            hurried.cancel()

    def restore(self) -> None:
        for signum in self._signals:
            asyncio.get_running_loop().remove_signal_handler(signum)
