"""Runs a placed request and streams its events.

Knows the loop and its buffer; no workers and no messages.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from betoken.router.round.events import Emit, Started
from betoken.router.round.generation import Generation
from betoken.router.round.round_loop import RoundLoop
from betoken.router.round.token_buffer import TokenBuffer


class Running(NamedTuple):
    """A placed request with the loop of its rounds."""

    generation: Generation
    started: Started
    loop: RoundLoop
    buffer: TokenBuffer

    async def stream(self, emit: Emit) -> None:
        """Run the loop concurrently with the emitter of its tokens, so that a slow stream does not block a round."""
        error: Exception | None = None
        async with asyncio.TaskGroup() as tasks:
            rounds = tasks.create_task(self.loop.run())
            try:
                await emit(self.started)
                while (tokens := await self.buffer.get()) is not None:
                    await emit(tokens)
            except Exception as caught:  # raised below: a TaskGroup would wrap it
                error = caught
                rounds.cancel()
        if error is not None:
            raise error
