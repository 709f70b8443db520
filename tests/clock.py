"""The clock of the tests' process, which replaces `time`'s: it stops while the process is stopped.

A machine that pauses for a second would otherwise end every timeout that is shorter at once, before the answers that
came meanwhile are read. Tests put it forward instead of waiting. Other processes, gRPC's deadlines among them, go by
the real time.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")

_TICK_S = 0.005
_LONGEST_STEP_NS = 20_000_000
"""More than this between two looks at the clock is time in which nothing could run; it is not counted."""

_sleep, _real_ns = time.sleep, time.monotonic_ns


class Clock:
    """Seconds in which this process ran, for `time.monotonic` and `time.perf_counter`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # which a signal's handler may take in the midst of it
        self._now_ns = self._seen_ns = _real_ns()

    def install(self) -> None:
        """Replace the clocks of `time`; before anything keeps one of them."""
        time.monotonic = time.perf_counter = self.now_s
        time.monotonic_ns = time.perf_counter_ns = self.now_ns
        time.sleep = self._sleep
        threading.Thread(target=self._tick, name="clock", daemon=True).start()

    def now_s(self) -> float:
        return self.now_ns() / 1e9

    def now_ns(self) -> int:
        with self._lock:
            seen_ns = _real_ns()
            self._now_ns += max(0, min(seen_ns - self._seen_ns, _LONGEST_STEP_NS))
            self._seen_ns = seen_ns
            return self._now_ns

    def advance(self, seconds: float) -> None:
        """Let so much time pass; an event loop sees it in its next turn."""
        with self._lock:
            self._now_ns += round(seconds * 1e9)

    async def hurry(self, awaitable: Awaitable[Result]) -> Result:
        """Result of an awaitable that mostly waits: time passes a hundred times faster."""
        task = asyncio.ensure_future(awaitable)
        while not task.done():
            await asyncio.sleep(0.01)
            self.advance(1.0)
        return await task

    def _tick(self) -> None:
        while True:
            _sleep(_TICK_S)
            self.now_ns()

    def _sleep(self, seconds: float) -> None:
        end_ns = self.now_ns() + round(seconds * 1e9)
        while True:
            _sleep(seconds)
            seconds = (end_ns - self.now_ns()) / 1e9
            if seconds <= 0:
                return


CLOCK = Clock()
