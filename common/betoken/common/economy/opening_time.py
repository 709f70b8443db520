"""The time of opening a sequence on a draft worker: from the request for its first draft until that came.

It is mostly the draft model's prefill of the text. A sequence that ends soon does not earn it back. Knows numbers; no
clock.
"""

from __future__ import annotations

from betoken.common.economy.means import DecayedMean

_DECAY = 0.5
"""Weight of the past, per opened sequence."""
_RELAXED, _RELAXED_PRIOR = 0.97, 0.9
"""Measured and assumed time after a sequence was not opened, as a share of before, so that neither is final."""
_PRIOR_SHARE = 0.25
"""Prefill of a token by an unknown drafter over a further token of the target's forward."""


class OpeningTime:
    """Seconds per token of the opened texts, by load level (log2 of the running sequences)."""

    def __init__(self) -> None:
        self._token_s: dict[int, DecayedMean] = {}
        self._num_tokens = DecayedMean(_DECAY)
        """Tokens of opened texts."""
        self._prior_share = _PRIOR_SHARE

    def add(self, num_tokens: int, seconds: float, level: int) -> None:
        """Add a sequence that was opened with a text of `num_tokens`."""
        self._token_s.setdefault(level, DecayedMean(_DECAY)).add(seconds / max(1, num_tokens))
        self._num_tokens.add(num_tokens)

    def seconds(self, num_tokens: float, level: int, target_token_s: float) -> float:
        """Return the expected time. `target_token_s`: added by a token to the target's forward, seconds.

        At a higher load than any measured one, all running sequences are taken to be opened at once.
        """
        if not self._token_s:
            return num_tokens * self._prior_share * target_token_s * 2.0**level
        nearest = min(self._token_s, key=lambda other: abs(other - level))
        return num_tokens * self._token_s[nearest].mean * 2.0 ** max(0, level - nearest)

    def mean_s(self, level: int, target_token_s: float) -> float:
        """Return the expected time for a text of mean length; 0 before one was opened."""
        return self.seconds(self._num_tokens.mean, level, target_token_s)

    def relax(self) -> None:
        """Lower all times a little: a sequence was not opened."""
        self._prior_share *= _RELAXED_PRIOR
        for mean in self._token_s.values():
            mean.total *= _RELAXED
