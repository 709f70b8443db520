"""The limits of one key or tenant, and its present use.

Knows neither keys nor requests nor the queue; its caller asks before letting work in and reports afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError

_MIN_RETRY_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one key or tenant; None = unlimited."""

    max_streams: int | None = None
    """Requests generated at once; more wait."""
    max_queue: int | None = None
    """Requests that wait; more are refused."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens per minute, as many may be saved up."""
    max_prompt_bytes: int | None = None
    """Bytes of one request's text, or four per prompt id."""


class Account:
    """The use of one key or tenant; outlives changes of its limits."""

    def __init__(self, name: str, limits: Limits) -> None:
        """`name` goes into errors, e.g. `key alice`."""
        self.name = name
        self.num_running = 0
        """Requests admitted and not finished."""
        self.num_waiting = 0
        """Requests in the queue."""
        self._limits = limits
        self._tokens = float(limits.tokens_per_minute or 0)
        self._counted_s = time.monotonic()

    @property
    def limits(self) -> Limits:
        """The limits."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        had_rate = self._limits.tokens_per_minute is not None
        self._refill()
        self._limits = limits
        most = float(limits.tokens_per_minute or 0)
        self._tokens = min(self._tokens, most) if had_rate else most

    @property
    def can_run(self) -> bool:
        """Whether one more of its requests may be generated now."""
        return self._limits.max_streams is None or self.num_running < self._limits.max_streams

    def check_queue(self, retry_after_s: float) -> None:
        """Whether one more of its requests may wait.

        Raises:
            ResourceExhaustedError: as many wait as may; `retry_after_s` is the queue's own advice.
        """
        most = self._limits.max_queue
        if most is not None and self.num_waiting >= most:
            raise ResourceExhaustedError(
                f"{self.name}: {self.num_running} requests run, {self.num_waiting} wait, at most {most} may",
                retry_after_s=retry_after_s,
            )

    def check_tokens(self, num_tokens: int = 1) -> None:
        """Check whether `num_tokens` are left. A request for more than a minute's tokens needs a full minute's and
        overdraws them; the next requests wait until that is made up.

        Raises:
            ResourceExhaustedError: they are not, with the time until they are.
        """
        rate = self._limits.tokens_per_minute
        if rate is None:
            return
        self._refill()
        needed = float(min(num_tokens, rate))
        if self._tokens < needed:
            seconds = max(_MIN_RETRY_AFTER_S, (needed - self._tokens) * 60.0 / rate)
            raise ResourceExhaustedError(f"{self.name}: {rate} tokens a minute are used up", retry_after_s=seconds)

    def check_prompt(self, field: str, num_bytes: int) -> None:
        """Whether a prompt of `num_bytes` may be sent.

        Raises:
            InvalidArgumentError: it is larger than a request of this account may be.
        """
        most = self._limits.max_prompt_bytes
        if most is not None and num_bytes > most:
            raise InvalidArgumentError(field, f"{num_bytes} bytes", f"must be at most {most} bytes for {self.name}")

    def check_answers(self, field: str, num_answers: int) -> None:
        """Check whether `num_answers` of one request may run or wait at the same time.

        Raises:
            InvalidArgumentError: they never may.
        """
        streams, queue = self._limits.max_streams, self._limits.max_queue
        if streams is not None and queue is not None and num_answers > streams + queue:
            raise InvalidArgumentError(field, num_answers, f"must be at most {streams + queue} for {self.name}")

    def charge(self, num_tokens: int) -> None:
        """Take tokens that were read or written for it, or are reserved; a negative number gives them back."""
        rate = self._limits.tokens_per_minute
        if rate is not None:
            self._refill()
            self._tokens = min(float(rate), self._tokens - num_tokens)

    def _refill(self) -> None:
        now_s = time.monotonic()
        rate = self._limits.tokens_per_minute
        if rate is not None:
            self._tokens = min(float(rate), self._tokens + (now_s - self._counted_s) * rate / 60.0)
        self._counted_s = now_s
