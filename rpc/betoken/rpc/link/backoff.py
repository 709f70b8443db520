"""How long a link waits before it dials again: ever longer, and longest for a worker that was refused.

Knows pauses and whether a channel is connected; knows no handshake.
"""

import asyncio
import random

import grpc

from betoken.rpc.link.options import LinkOptions

_LOOK_S = 1.0
"""Interval of checking a rejected worker's connection: an ended one may have belonged to another process."""


class Backoff:
    """The pauses of one link."""

    def __init__(self, options: LinkOptions, is_local: bool = False) -> None:
        """`is_local`: whether dials are cheap, so that pauses stay short."""
        self._options = options
        self._max_s = min(options.max_backoff_s, options.max_local_backoff_s) if is_local else options.max_backoff_s
        self._last_s = self._last_refused_s = 0.0
        self._wake = asyncio.Event()

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._last_s = self._last_refused_s = 0.0

    def wake(self) -> None:
        """End the pause under way, if any: there is reason to dial now."""
        self._wake.set()

    async def pause(self, refused_by: grpc.aio.Channel | None = None, *, is_loading: bool = False) -> None:
        """Sleep between half of the next pause and all of it, or until `wake`, which may have come just before.

        `refused_by`: the channel to a worker that does not fit, or wants no such router. Only another process there
        helps, or a change of other workers, reported by `wake`: after a usual pause it waits for the connection's end.
        `is_loading`: whether the worker loads; the next failure is again a first one.
        """
        options = self._options
        if is_loading:
            self.reset()
            await self._sleep(options.max_local_backoff_s)
            return
        self._last_s = min(self._max_s, max(options.initial_backoff_s, self._last_s * 2))
        if await self._sleep(self._last_s * random.uniform(0.5, 1.0)) or refused_by is None:
            return
        longer_s = max(options.initial_backoff_s, self._last_refused_s * 2)
        self._last_refused_s = min(options.max_refused_backoff_s, longer_s)
        left_s = self._last_refused_s * random.uniform(0.5, 1.0)
        while left_s > 0.0 and refused_by.get_state() is grpc.ChannelConnectivity.READY:
            if await self._sleep(min(left_s, _LOOK_S)):
                return
            left_s -= _LOOK_S

    async def _sleep(self, seconds: float) -> bool:
        """Whether `wake` ended it."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            return False
        self._wake.clear()
        return True
