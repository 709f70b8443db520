"""The place of a run between 0 and 1, and the learning rate and window length there.

A budget is either tokens (reproducible) or minutes of training time (for a shared machine of unknown speed). Knows no
model and no data.
"""

from __future__ import annotations

from dataclasses import dataclass

WARMUP_FRACTION = 0.02
DECAY_FROM = 0.4


@dataclass(frozen=True)
class Budget:
    """The budget of a run; exactly one of the two is set."""

    tokens: int | None = None
    """Predicted training tokens."""
    minutes: float | None = None
    """Training time, summed over resumed runs."""

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.minutes is None):
            raise ValueError("a budget is either tokens or minutes")
        if (self.tokens if self.tokens is not None else self.minutes or 0) <= 0:
            raise ValueError(f"a budget is positive, not {self}")

    def fraction(self, num_tokens: int, elapsed_s: float) -> float:
        """Part of the budget already spent, in [0, 1]."""
        if self.tokens is not None:
            return min(1.0, num_tokens / self.tokens)
        assert self.minutes is not None
        return min(1.0, elapsed_s / (60 * self.minutes))


def learning_rate_scale(fraction: float) -> float:
    """Linear warm-up, constant, then linear to zero: a factor in (0, 1] while fraction < 1."""
    if fraction < WARMUP_FRACTION:
        return 0.05 + 0.95 * fraction / WARMUP_FRACTION
    return min(1.0, (1 - fraction) / (1 - DECAY_FROM))


def window_tokens(fraction: float, short: int, long: int, long_from: float) -> int:
    """Window length: `short` until `long_from` of the budget is spent, `long` for the rest."""
    return short if fraction < long_from else long
