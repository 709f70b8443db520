"""The tokens of one request that its client has not been sent yet.

One coroutine fills it, one empties it; rounds that wait leave together, and a client that does not read stops the
filler. Writing a message costs the router more than deciding its tokens, so with many streams each lets some gather.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from betoken.router.round.events import EmittedRound, PromptLogprobsPart, Tokens

_LEAST_PAUSE_S = 0.001  # a shorter one is not worth its timer


class TokenBuffer:
    """Rounds between a request's loop and its stream."""

    def __init__(self, max_waiting_tokens: int = 256, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        """`pause_s`: how long tokens gather after others were taken; the first and the last of all never wait."""
        self._max_waiting_tokens = max_waiting_tokens
        self._pause_s = pause_s
        self._is_begun = False
        self._of_prompt: deque[PromptLogprobsPart] = deque()
        self._rounds: list[EmittedRound] = []
        self._num_tokens = 0
        """Tokens that wait, of rounds and with logprobs of the prompt."""
        self._is_closed = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._pausing: asyncio.Future[None] | None = None

    def put(self, emitted: EmittedRound) -> None:
        """Append a round."""
        self._rounds.append(emitted)
        self._added(len(emitted.ids))

    def put_prompt(self, part: PromptLogprobsPart) -> None:
        """Append logprobs of the prompt; before all rounds."""
        self._of_prompt.append(part)
        self._added(len(part.logprobs))

    def _added(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._reader is not None:
            asyncio.get_running_loop().call_soon(_wake, self._reader)  # one turn late: the next request leaves first
            self._reader = None

    @property
    def is_full(self) -> bool:
        """Whether the reader is far behind."""
        return self._num_tokens >= self._max_waiting_tokens and not self._is_closed

    async def room(self) -> None:
        """Return once the reader has caught up; at once unless it is far behind."""
        while self.is_full:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer

    def close(self, error: Exception | None = None) -> None:
        """Nothing more will be put; after what waits, the reader gets `error`."""
        self._is_closed = True
        self._error = error
        _wake(self._reader)
        _wake(self._pausing)

    async def get(self) -> PromptLogprobsPart | Tokens | None:
        """The prompt's logprobs one by one, then all rounds that wait, as soon as any do and the pause is over; None
        once closed and empty, or the error it was closed with."""
        if self._is_begun and not self._is_closed:
            await self._pause()
        while not (self._rounds or self._of_prompt):
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        told: PromptLogprobsPart | Tokens
        if self._of_prompt:
            told = self._of_prompt.popleft()
            self._num_tokens -= len(told.logprobs)
        else:
            told = Tokens(self._rounds)
            self._rounds, self._num_tokens = [], 0
            self._is_begun = True
        _wake(self._writer)
        return told

    async def _pause(self) -> None:
        pause_s = self._pause_s()
        if pause_s < _LEAST_PAUSE_S:
            return
        loop = asyncio.get_running_loop()
        self._pausing = loop.create_future()
        timer = loop.call_later(pause_s, _wake, self._pausing)
        try:
            await self._pausing
        finally:
            timer.cancel()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
