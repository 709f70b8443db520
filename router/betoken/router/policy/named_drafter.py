"""Trials of a drafter that a client named while the speculation policy is off."""

from __future__ import annotations

import math

TOKENS_PER_TRIAL = 256
"""Tokens from one draft to the next. A draft that is not accepted costs about three decode steps: one per cent."""


class NamedDrafterTrials:
    """Schedules one draft at the start of a request that names its drafter, and one after each `TOKENS_PER_TRIAL`."""

    def __init__(self, *, is_named: bool) -> None:
        """`is_named`: whether the client named the drafter; otherwise no draft is ever due."""
        self._num_tokens_left: float = 0 if is_named else math.inf

    @property
    def is_due(self) -> bool:
        """Whether a draft is due although the policy is off."""
        return self._num_tokens_left <= 0

    def tried(self) -> None:
        """Record that a draft was requested and arrived or failed."""
        if self._num_tokens_left < math.inf:
            self._num_tokens_left = TOKENS_PER_TRIAL

    def add_tokens(self, num_tokens: int) -> None:
        """Record committed tokens."""
        self._num_tokens_left -= num_tokens
