"""Whether one side is nearly as fast as the best of others, from speeds measured in pairs.

A pair is two sides on the same prompt, close in time. The best is picked by its median over the measurements that are
then compared, so luck favours it. The ratio therefore comes out too low, the more so the closer the candidates are.
Knows numbers only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

import numpy as np

MARGIN = 0.05
MIN_PAIRS = 15
NUM_RESAMPLES = 10_000
CONFIDENCE = 0.95


class Verdict(StrEnum):
    """The verdict of the interval on the margin."""

    WITHIN = "within 5 %"
    NOT_WITHIN = "not within 5 %"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """Geometric mean of the pairs' ratios and its bootstrap interval [low, high]."""

    ratio: float
    low: float
    high: float
    num_pairs: int

    @property
    def verdict(self) -> Verdict:
        """The decision on 1 - MARGIN."""
        is_within = self.is_at_least(1 - MARGIN)
        if is_within is None:
            return Verdict.UNDECIDED
        return Verdict.WITHIN if is_within else Verdict.NOT_WITHIN

    def is_at_least(self, bound: float) -> bool | None:
        """Return whether the ratio reaches `bound`; None unless the whole interval is on one side of it and there are
        at least MIN_PAIRS."""
        if self.num_pairs < MIN_PAIRS or self.low < bound <= self.high:
            return None
        return self.low >= bound


def best_by_median(speeds: Mapping[str, Sequence[float]]) -> str:
    """The name with the highest median; the first of equals."""
    return max(speeds, key=lambda name: median(speeds[name]))


def estimate(ratios: Sequence[float]) -> PairedRatio:
    """The geometric mean of independent ratios, one per prompt, with a percentile bootstrap interval.

    The logarithms are resampled with replacement: a ratio and its inverse count alike.

    Raises:
        ValueError: no ratios, or a ratio of 0 or less.
    """
    if not ratios or min(ratios) <= 0:
        raise ValueError(f"ratios: {len(ratios)} of them, the least {min(ratios, default=None)}; all must be above 0")
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    rows = np.random.default_rng(0).integers(0, len(logs), size=(NUM_RESAMPLES, len(logs)))
    low, high = np.quantile(logs[rows].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return PairedRatio(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(logs))
