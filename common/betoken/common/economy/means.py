"""Means that forget: per addition, per second, and per round by how sure a draft was. Knows no clock."""

import math
from dataclasses import dataclass


@dataclass(slots=True)
class DecayedMean:
    """Mean of what was added; each addition lowers the weight of those before it."""

    decay: float
    """Weight of the past per addition, (0, 1]."""
    total: float = 0.0
    num: float = 0.0
    """Additions, each by its present weight."""

    def add(self, value: float) -> None:
        self.total = self.decay * self.total + value
        self.num = self.decay * self.num + 1

    @property
    def mean(self) -> float:
        """0 before the first addition."""
        return self.total / self.num if self.num else 0.0


@dataclass(slots=True)
class TimeDecayedRate:
    """Tokens per second; what was added loses weight with the seconds added after it."""

    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: float, seconds: float, memory_s: float) -> None:
        """`memory_s`: seconds in which the weight of earlier additions falls to 1 / e."""
        decay = math.exp(-seconds / memory_s)
        self.tokens = decay * self.tokens + tokens
        self.seconds = decay * self.seconds + seconds

    @property
    def mean(self) -> float:
        """0 before the first addition that took time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class RoundMeans:
    """Mean of a number per round, by the confidence the round's draft was made with."""

    def __init__(self, decay: float, prior: "RoundMeans | None" = None, prior_rounds: float = 0.0) -> None:
        """At the first round of a confidence the knowledge of `prior` counts as `prior_rounds` rounds."""
        self._decay = decay
        self._prior = prior
        self._prior_rounds = prior_rounds
        self._all = DecayedMean(decay)
        self._means: dict[int, DecayedMean] = {}

    def knows(self, confidence: int) -> bool:
        """Whether anything was added under it."""
        return confidence in self._means

    def add(self, confidence: int, value: float) -> None:
        self._all.add(value)
        (self._known(confidence) or self._means.setdefault(confidence, DecayedMean(self._decay))).add(value)

    def mean(self, confidence: int) -> float:
        """Mean at that confidence; the mean of all while it is unknown, 0 before the first round."""
        known = self._known(confidence)
        return known.mean if known else self._mean_of_all()

    def _known(self, confidence: int) -> DecayedMean | None:
        known = self._means.get(confidence)
        if known is None and self._prior is not None and (prior := self._prior._known(confidence)):
            known = DecayedMean(self._decay, self._prior_rounds * prior.mean, self._prior_rounds)
            self._means[confidence] = known
        return known

    def _mean_of_all(self) -> float:
        return self._all.mean or (self._prior._mean_of_all() if self._prior is not None else 0.0)
