"""When to call again, and how long to wait before it.

A pure function of a policy, a clock and chance; never sleeps and never calls.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from numbers import Real
from typing import cast

from betoken.client.config import RetryPolicy
from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    InvalidArgumentError,
    LoadingError,
    ResourceExhaustedError,
    UnavailableError,
)

_LONGEST_TIMEOUT_S = 1e9  # 30 years; gRPC counts nanoseconds since 1970 in 64 bits


class Retries:
    """The retries of one call, within one deadline over all of them."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[float, float], float] = random.uniform,
    ) -> None:
        """`timeout_s` None, infinite or beyond all clocks = no deadline, since gRPC would treat it as expired.

        Raises:
            InvalidArgumentError: `timeout_s` is not a number.
        """
        timeout_s = None if timeout_s is None else _seconds(timeout_s)
        self._policy = policy
        self._clock = clock
        self._uniform = uniform
        self._timeout_s = None if timeout_s is None or timeout_s > _LONGEST_TIMEOUT_S else timeout_s
        self._num_in_a_row = 0
        self._failing_since = 0.0
        self.begin()

    def begin(self) -> None:
        """The call begins now and not before: its deadline and any outage count from here."""
        self._progress_at = self._clock()
        self._deadline = None if self._timeout_s is None else self._progress_at + self._timeout_s

    def remaining_s(self) -> float | None:
        """Time left; None = no deadline.

        Raises:
            DeadlineExceededError: none is left.
        """
        if self._deadline is None:
            return None
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise DeadlineExceededError("the deadline passed before the call could be made")
        return remaining

    def progressed(self) -> None:
        """Something new arrived: the next failure is again a first one."""
        self._num_in_a_row = 0
        self._progress_at = self._clock()

    def delay_after(self, error: BetokenError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            BetokenError: `error` itself, when another attempt is pointless, not wanted or no longer possible in time.
        """
        if not self._can_retry(error) or self._num_in_a_row >= self._policy.max_retries:
            raise error
        now = self._clock()
        if not self._num_in_a_row:
            self._failing_since = now
        if now - self._progress_at >= self._policy.max_outage_s:
            raise error
        if (failing_s := now - self._failing_since) >= self._policy.max_failing_s:
            error.add_note(f"given up after {failing_s:.0f} s of failing attempts (RetryPolicy.max_failing_s)")
            raise error
        longest = min(self._policy.initial_backoff_s * 2.0 ** min(self._num_in_a_row, 64), self._policy.max_backoff_s)
        self._num_in_a_row += 1
        delay = self._uniform(longest / 2, longest)
        if isinstance(error, ResourceExhaustedError):
            delay = max(delay, error.retry_after_s or 0.0)
        if self._deadline is not None and self._clock() + delay >= self._deadline:
            raise error
        return delay

    def _can_retry(self, error: BetokenError) -> bool:
        if isinstance(error, ResourceExhaustedError):
            return self._policy.retry_when_exhausted
        if isinstance(error, LoadingError):
            return self._policy.retry_while_loading
        return isinstance(error, UnavailableError)


def _seconds(value: object) -> float:
    """Converted to Python's own float, since sums of a time of day and numpy's float32 are minutes off."""
    try:
        seconds = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        seconds = math.inf if cast(int, value) > 0 else -math.inf
    if math.isnan(seconds):
        raise InvalidArgumentError("timeout_s", value, "must be a number of seconds, or None")
    return seconds
