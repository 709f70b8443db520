"""Whether drafts pay at present, found by going without them now and then.

Drafts cost more than their own time: their rows hold up every sequence, and a draft worker may share the verify
worker's processor. Sequences that each weighed their own gain would go on drafting where all would be faster without.
So all sequences of a kind draft or none does, and the comparison is between the rates at which they get tokens. Knows
times and numbers of tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from betoken.common.economy.means import TimeDecayedRate

_MEMORY_S = 2.0
"""Time in which the weight of what was seen falls to 1 / e, per running sequence."""
_TRIAL_COMMITS = 4
"""Per running sequence, in a trial."""
_LEAST_TRIAL_S = 0.1
_LEAST_CROWD_TRIAL_S = 0.5
"""Shortest trial of several sequences, seconds. Their pace wavers: prompts of new ones hold the others up."""
_TRIAL_SHARE = 0.01
"""Part of the tokens that trying the slower way may cost."""
_GAIN_DECAY = 0.5
"""Weight of the trials before, per trial: one alone is short, and may fall in a slow moment."""
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Time with sequences at work from one trial to the next."""
_FIRST_CROWD_PAUSE_S, _FIRST_CROWD_TRIAL_S = 0.15, 0.15
"""Pause and trial of several sequences that are little known, seconds: a short burst has no time for longer ones."""
_TRIAL_NOISE = 0.25
"""Standard deviation of one short trial's log(speed with drafts / speed without), as measured."""
_MAX_FIRST_TRIALS = 6
"""Short trials of a crowd, after which what they say is taken for what is."""


@dataclass(slots=True)
class _Crowd:
    """Measurements for a number of running sequences, to the nearest power of two."""

    is_worth: bool = True
    """Whether drafts pay, by what was tried."""
    gain: float = 0.0
    """Decayed mean over trials of log(speed with drafts / speed without); the plain mean of short ones."""
    num_trials: int = 0
    """Trials judged."""
    speed: TimeDecayedRate = field(default_factory=TimeDecayedRate)
    """Speed of the way in use; trials are kept apart."""
    busy_s: float = 0.0
    """Time with sequences at work since the last trial."""
    pause_s: float = _LEAST_PAUSE_S
    """From that trial to the next."""

    @property
    def is_known(self) -> bool:
        """Whether trials tell the faster way: two standard errors apart, or as many as short ones may be."""
        n = self.num_trials
        return n >= _MAX_FIRST_TRIALS or (n > 0 and abs(self.gain) * math.sqrt(n) > 2.0 * _TRIAL_NOISE)


class SpeculationGate:
    """Open while sequences of one kind are to draft. A sequence alone drafts for a second before anything is tried."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        """`num_running`: all sequences at work, of whatever kind."""
        self._num_running = num_running
        self.is_open = True
        self._since_s = -math.inf
        """When it opened or closed last."""
        self._crowds: dict[int, _Crowd] = {}
        self._trial: TimeDecayedRate | None = None
        self._trial_size = 0
        """Size of the crowd that the trial is for, log2 of its sequences."""
        self._num_commits = 0
        self._trial_s = 0.0
        """Commits and busy seconds counted in the current trial."""

    def record(self, started_s: float, now_s: float, num_tokens: int) -> None:
        """A sequence that went the present way, by drafts or without, got tokens in that time."""
        if started_s < self._since_s:  # part of it was the other way
            return
        num_running = max(1, self._num_running())
        size = round(math.log2(num_running))
        crowd = self._crowds.get(size) or self._meet(size)
        if self._trial is None:
            self._record_usual(crowd, size, num_running, num_tokens, started_s, now_s)
        elif size != self._trial_size:  # speeds of unlike crowds do not compare
            tried = self._crowds[self._trial_size]
            tried.pause_s = min(_LONGEST_PAUSE_S, 2.0 * tried.pause_s)  # or numbers that waver would be tried for ever
            self._end_trial(crowd, now_s)
        else:
            self._trial.add(num_tokens, now_s - started_s, _MEMORY_S * num_running)
            self._num_commits += 1
            self._trial_s += (now_s - started_s) / num_running
            least_s = _LEAST_TRIAL_S
            if size > 0:
                least_s = _LEAST_CROWD_TRIAL_S if crowd.is_known else _FIRST_CROWD_TRIAL_S
            if self._num_commits >= _TRIAL_COMMITS * num_running and self._trial_s >= least_s:
                self._judge(crowd, self._trial, now_s)

    def _meet(self, size: int) -> _Crowd:
        """A crowd like the nearest that is known, until it has been tried itself."""
        nearest = min(self._crowds, key=lambda other: abs(other - size), default=None)
        crowd = self._crowds[size] = _Crowd() if nearest is None else _Crowd(self._crowds[nearest].is_worth)
        if size > 0:
            crowd.pause_s = _FIRST_CROWD_PAUSE_S
        return crowd

    def _record_usual(
        self, crowd: _Crowd, size: int, num_running: int, num_tokens: int, started_s: float, now_s: float
    ) -> None:
        seconds = now_s - started_s
        if crowd.is_worth != self.is_open:  # another crowd than before
            self._turn(crowd.is_worth, now_s)
            return
        crowd.speed.add(num_tokens, seconds, _MEMORY_S * num_running)
        crowd.busy_s += seconds / num_running
        if crowd.busy_s >= crowd.pause_s:
            crowd.busy_s = 0.0
            self._trial, self._trial_size, self._num_commits, self._trial_s = TimeDecayedRate(), size, 0, 0.0
            self._turn(not crowd.is_worth, now_s)

    def _judge(self, crowd: _Crowd, trial: TimeDecayedRate, now_s: float) -> None:
        gain = math.log(trial.mean / crowd.speed.mean) * (1.0 if self.is_open else -1.0)
        was_unknown = not crowd.is_known
        crowd.num_trials += 1
        weight = 1.0 / crowd.num_trials if was_unknown else max(1.0 - _GAIN_DECAY, 1.0 / crowd.num_trials)
        crowd.gain += weight * (gain - crowd.gain)
        if crowd.is_worth != (crowd.gain > 0.0):
            crowd.is_worth, crowd.speed = self.is_open, trial
        lost_s = self._trial_s * (1.0 - math.exp(-abs(gain)))
        crowd.pause_s = min(_LONGEST_PAUSE_S, max(_LEAST_PAUSE_S, lost_s / _TRIAL_SHARE))
        if self._trial_size > 0 and not crowd.is_known:
            crowd.pause_s = _FIRST_CROWD_PAUSE_S
        self._end_trial(crowd, now_s)

    def _end_trial(self, crowd: _Crowd, now_s: float) -> None:
        self._trial = None
        if self.is_open != crowd.is_worth:
            self._turn(crowd.is_worth, now_s)

    def _turn(self, is_open: bool, now_s: float) -> None:
        self.is_open, self._since_s = is_open, now_s
