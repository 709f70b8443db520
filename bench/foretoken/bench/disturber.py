"""Harms the draft worker while streams run, several times per run, and mends it again.

Acts on the number of tokens streamed so far, so that it strikes mid-stream on machines of any speed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

STRIKE_SHARES = (0.05, 0.3, 0.55, 0.8)
"""Shares of the expected tokens at which the worker is harmed."""
MEND_AFTER_SHARE = 0.12
"""It is mended after so large a further share."""


@dataclass(slots=True)
class Disturber:
    """Strikes and mends in turn; tell it of tokens with `streamed`, await `run` in a task of its own."""

    expected_tokens: int
    strike: Callable[[], Awaitable[None]]
    mend: Callable[[], Awaitable[None]]
    num_strikes: int = 0
    _streamed: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def streamed(self, num_tokens: int) -> None:
        """Count tokens that reached a client."""
        self._streamed += num_tokens
        self._changed.set()

    async def run(self) -> None:
        """Strike and mend until cancelled; always leaves the worker mended."""
        for share in STRIKE_SHARES:
            await self._wait_until(share * self.expected_tokens)
            await self.strike()
            self.num_strikes += 1
            try:
                await self._wait_until((share + MEND_AFTER_SHARE) * self.expected_tokens)
            finally:
                await asyncio.shield(self.mend())

    async def _wait_until(self, num_tokens: float) -> None:
        while self._streamed < num_tokens:
            self._changed.clear()
            await self._changed.wait()
