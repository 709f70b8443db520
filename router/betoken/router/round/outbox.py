"""The tokens of one request that its client has not been sent yet.

One coroutine fills it, one empties it; tokens that wait are merged, and a client that does not read stops the filler.
Writing a message costs the router more than deciding its tokens, so with many streams each lets some gather.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from betoken.router.request import GenerationRequest
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import FinishReason
from betoken.v1.generation_pb2 import RoundTimes
from betoken.v1.types_pb2 import TokenLogprobs, TokenOrigin

_LEAST_PAUSE_S = 0.001  # a shorter one is not worth its timer


@dataclass(frozen=True, slots=True)
class Started:
    """First event."""

    request: GenerationRequest


@dataclass(slots=True)
class Tokens:
    """Tokens and the text that became final with them."""

    ids: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per id when asked for, else empty."""
    text: str = ""
    num_chars: list[int] = field(default_factory=list)
    """Characters of `text` that became final with each id."""
    rounds: list[RoundTimes] = field(default_factory=list)
    """Times of the rounds, where they are told."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event."""

    reason: FinishReason
    stop: str
    num_prompt_tokens: int
    num_output_tokens: int
    """Resumed ones included."""
    num_new_tokens: int
    """Tokens sent now."""
    num_cached_tokens: int
    counts: SpeculationCounts
    queue_ns: int
    time_to_first_token_ns: int
    duration_ns: int


class Outbox:
    """Token events between a generation and its stream."""

    def __init__(self, max_waiting_tokens: int = 256, pause_s: Callable[[], float] = lambda: 0.0) -> None:
        """`pause_s`: how long tokens gather after others were taken; the first and the last of all never wait."""
        self._max_waiting_tokens = max_waiting_tokens
        self._pause_s = pause_s
        self._is_begun = False
        self._tokens: Tokens | None = None
        self._is_closed = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._pausing: asyncio.Future[None] | None = None

    def put(
        self,
        ids: Sequence[int],
        origins: Sequence[TokenOrigin],
        sources: Sequence[str],
        logprobs: Sequence[TokenLogprobs],
        text: str,
        num_chars: Sequence[int],
        times: RoundTimes | None = None,
    ) -> None:
        """Append the tokens of a round."""
        tokens = self._tokens
        if tokens is None:
            tokens = self._tokens = Tokens()
        tokens.ids += ids
        tokens.origins += origins
        tokens.sources += sources
        tokens.logprobs += logprobs
        tokens.text += text
        tokens.num_chars += num_chars
        if times is not None:
            tokens.rounds.append(times)
        if self._reader is not None:
            asyncio.get_running_loop().call_soon(_wake, self._reader)  # one turn late: the next request leaves first
            self._reader = None

    @property
    def is_full(self) -> bool:
        """Whether the reader is far behind."""
        return self._tokens is not None and len(self._tokens.ids) >= self._max_waiting_tokens and not self._is_closed

    async def room(self) -> None:
        """Return once the reader has caught up; at once unless it is far behind."""
        while self.is_full:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer

    def close(self, error: Exception | None = None) -> None:
        """No more items come; after the waiting ones the reader gets `error`."""
        self._is_closed = True
        self._error = error
        _wake(self._reader)
        _wake(self._pausing)

    async def get(self) -> Tokens | None:
        """All that waits, as soon as anything does and the pause is over; None once closed and empty, or the error it
        was closed with."""
        if self._is_begun and not self._is_closed:
            await self._pause()
        while self._tokens is None:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        tokens, self._tokens = self._tokens, None
        self._is_begun = True
        _wake(self._writer)
        return tokens

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
