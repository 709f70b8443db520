"""Decides whether rounds of a drafter are overlapped: on while measured times say that this is faster.

Running averages of hit rate, drafting and verification times enter the formulas of `speedup`. Verification is measured
in both ways, because drafting ahead slows it on shared cores. Counts rounds and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from betoken.common.economy.means import DecayedMean
from betoken.common.economy.speedup import RoundCosts, overlapped_round_time, synchronous_round_time

NUM_TRIAL_ROUNDS = 24
"""Rounds of a trial, of either way."""
MIN_PAUSE_ROUNDS = 256
"""Rounds between two trials; doubles with each trial that changes nothing."""
MAX_PAUSE_ROUNDS = 4096
MIN_GAIN = 1.03
"""Expected gain from which overlap is switched on; it is switched off below 1."""
_KEPT = 0.95
"""Weight of the past in a running average."""


def _mean() -> DecayedMean:
    return DecayedMean(_KEPT)


@dataclass(slots=True)
class OverlapPolicy:
    """State of one drafter at one draft worker."""

    is_on: bool = False
    """Whether the next round is overlapped."""
    _is_better: bool = False
    """Whether overlap is faster by the last decision; the other way is on during a trial only."""
    _num_left: int = NUM_TRIAL_ROUNDS
    """Rounds until the next change."""
    _pause: int = MIN_PAUSE_ROUNDS
    _draft_s: DecayedMean = field(default_factory=_mean)
    """Wait for a draft that was not made ahead, per token."""
    _num_tokens: DecayedMean = field(default_factory=_mean)
    _hits: DecayedMean = field(default_factory=_mean)
    _verify_s: dict[bool, DecayedMean] = field(default_factory=lambda: {False: _mean(), True: _mean()})
    """Wait for a verification result, by whether the round was overlapped."""

    def record(
        self, num_tokens: int, draft_s: float, verify_s: float, is_hit: bool | None, is_overlapped: bool
    ) -> None:
        """Count a round with a draft.

        Args:
            draft_s: wait for the draft, seconds.
            verify_s: wait for the verification result, seconds.
            is_hit: whether the draft was made ahead; None = nothing was to be.
            is_overlapped: whether the drafter was to draft ahead during the verification.
        """
        if not is_hit:
            self._draft_s.add(draft_s / num_tokens)
        if is_hit is not None:
            self._hits.add(float(is_hit))
        self._num_tokens.add(num_tokens)
        self._verify_s[is_overlapped].add(verify_s)
        self._num_left -= 1
        if self._num_left <= 0:
            self._change()

    @property
    def gain(self) -> float:
        """Expected speed of overlapped rounds over synchronous ones; before overlap was measured at best, with hits
        only; 1 = not known."""
        plain, overlapped = self._verify_s[False], self._verify_s[True]
        num_tokens = round(self._num_tokens.mean)
        if not (plain.mean > 0 and num_tokens):
            return 1.0
        draft = self._draft_s.mean / plain.mean
        hit_rate, verify = (self._hits.mean, overlapped.mean / plain.mean) if self._hits.num else (1.0, 1.0)
        synchronous = synchronous_round_time(num_tokens, RoundCosts(draft))
        return synchronous / overlapped_round_time(num_tokens, RoundCosts(draft, verify), hit_rate)

    def _change(self) -> None:
        """Begin a trial of the other way, or decide after one."""
        is_trial = self.is_on != self._is_better
        if not is_trial:
            is_hopeless = not self._is_better and not self._hits.num and self.gain < MIN_GAIN
            self.is_on = self._is_better if is_hopeless else not self._is_better
            self._num_left = self._pause if is_hopeless else NUM_TRIAL_ROUNDS
            return
        was_better, gain = self._is_better, self.gain if self._hits.num else 1.0
        self._is_better = gain >= (1.0 if was_better and self._hits.num else MIN_GAIN)
        is_same = self._is_better == was_better
        self._pause = min(2 * self._pause, MAX_PAUSE_ROUNDS) if is_same else MIN_PAUSE_ROUNDS
        self.is_on, self._num_left = self._is_better, self._pause
