"""Injects faults into a worker while streams run, several times per run, and recovers it.

Acts on the number of tokens streamed so far, so that it strikes mid-stream on machines of any speed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

STRIKE_SHARES = (0.05, 0.3, 0.55, 0.8)
"""Shares of the expected tokens at which faults are injected."""
MEND_AFTER_SHARE = 0.12
"""Further share after which the worker is recovered."""


@dataclass(slots=True)
class Disturber:
    """Injects faults and recovers in turn; report tokens with `streamed`, the end with `finish`."""

    expected_tokens: int
    strike: Callable[[], Awaitable[None]]
    mend: Callable[[], Awaitable[None]]
    num_strikes: int = 0
    _num_streamed: int = 0
    _is_finished: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def streamed(self, num_tokens: int) -> None:
        """Count tokens that reached a client."""
        self._num_streamed += num_tokens
        self._changed.set()

    def finish(self) -> None:
        """Report the end of all tokens: `run` recovers the worker and returns."""
        self._is_finished = True
        self._changed.set()

    async def run(self) -> None:
        """Inject faults until all are done or the run is over; leaves the worker recovered."""
        for share in STRIKE_SHARES:
            if not await self._reaches(share):
                return
            await self.strike()
            self.num_strikes += 1
            await self._reaches(share + MEND_AFTER_SHARE)
            await self.mend()

    async def _reaches(self, share: float) -> bool:
        """Wait for that share of the expected tokens; False when the run is over before it."""
        while self._num_streamed < share * self.expected_tokens and not self._is_finished:
            self._changed.clear()
            await self._changed.wait()
        return not self._is_finished
