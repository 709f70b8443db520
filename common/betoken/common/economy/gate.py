"""Whether drafts pay at present: what is expected of them, corrected by going the other way now and then.

Drafts cost more than their own time: their rows hold up every sequence, and a draft worker may share the verify
worker's processor. Sequences that weigh only their own gain would keep drafting although all would be faster without.
So all sequences of a kind draft or none does, and what is compared is how fast they get tokens. Knows times and numbers
of tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from betoken.common.economy.means import TimeDecayedRate
from betoken.common.economy.prospect import Prospect

_MEMORY_S = 2.0
"""Time in which the weight of what was seen falls to 1 / e, per running sequence."""
_LEAST_COMMITS = 4
"""Per running sequence, before the speed of a way counts."""
_NOISE = 0.07
"""Standard deviation of the log of a speed measured for a second. Measured: two of 0.15 s differ by 0.25."""
_EXPECTATION_S = 0.3
"""Weight of the expectation, as seconds of trial."""
_MOST_EVIDENCE_S = 0.5
"""Seconds of trials that count at most, so that a change is noticed."""
_USUAL_TRIAL_S, _LONGEST_TRIAL_S = 0.15, 0.3
"""Seconds that a trial is reckoned to take, and takes at most."""
_TRIAL_SHARE = 0.01
"""Part of the tokens that trying the slower way may cost."""
_LEAST_PAUSE_S, _LEAST_LONE_PAUSE_S, _LONGEST_PAUSE_S = 0.15, 1.0, 60.0
"""Time with sequences at work from one trial to the next; the second of a sequence alone."""


class Step(NamedTuple):
    """The yield of one sequence's round, or of a plain step."""

    started_s: float
    now_s: float
    num_tokens: int
    num_rows: int = 1
    """The token before, and its draft tokens."""
    waiting_s: float = 0.0
    """Part of the time until its draft was there."""
    row_s: float = 0.0
    """Time that a row adds to a forward at present; 0 = not known."""


class PolicyState(NamedTuple):
    """Whether sequences of a kind draft now, and why."""

    is_on: bool
    expected_speedup: float
    """Speed with drafts over the speed without; 0 = not known yet."""
    reason: str


@dataclass(slots=True)
class _Crowd:
    """Measurements for a number of running sequences, to the nearest power of two."""

    is_worth: bool
    """Whether drafts pay."""
    is_judged: bool = False
    """Whether that was found, not assumed."""
    gain: float | None = None
    """log(speed with drafts / speed without) when it was weighed last; None before that."""
    surprise: float = 0.0
    """Sum over trials of what was measured beyond what was expected, by seconds of trial."""
    evidence_s: float = 0.0
    """Seconds of trials behind it."""
    with_drafts: TimeDecayedRate = field(default_factory=TimeDecayedRate)
    """Speed with drafts."""
    without: TimeDecayedRate = field(default_factory=TimeDecayedRate)
    """Speed without drafts."""
    num_commits: int = 0
    """Commits in the present way since the last trial began or ended."""
    busy_s: float = 0.0
    """Time with sequences at work since then."""
    usual_s: float = 0.0
    """Time with sequences at work in the usual way before the last trial, seconds, at most one."""
    trial_s: float = _USUAL_TRIAL_S
    """Length of the last trial, seconds."""
    patience: float = 1.0
    """Factor of the pause to the next trial: trials that came to no end are tried ever more seldom."""

    def begin_anew(self) -> None:
        """A trial begins or ends."""
        self.num_commits, self.busy_s = 0, 0.0

    def believed(self, expected: float, measured: float = 0.0, trial_s: float = 0.0) -> tuple[float, float]:
        """log(speed with drafts / speed without) and its standard error: what is expected, corrected by the trials and
        the one under way."""
        total_s = _EXPECTATION_S + self.evidence_s + trial_s
        gain = expected + (self.surprise + trial_s * (measured - expected)) / total_s
        usual_s = self.usual_s + _EXPECTATION_S  # what trials are held against is as noisy as they are
        return gain, _NOISE * math.sqrt(1.0 / total_s + 1.0 / usual_s)

    def learn(self, expected: float, measured: float, trial_s: float) -> None:
        """A trial of so many seconds is over."""
        self.surprise += trial_s * (measured - expected)
        self.evidence_s += trial_s
        kept = min(1.0, _MOST_EVIDENCE_S / self.evidence_s)
        self.surprise, self.evidence_s = kept * self.surprise, kept * self.evidence_s


class SpeculationGate:
    """Open while sequences of one kind are to draft. A sequence alone drafts for a second before anything is tried."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        """`num_running`: all sequences at work, of whatever kind."""
        self._num_running = num_running
        self._way = True
        """Whether the steps that count now are those with drafts."""
        self._since_s = -math.inf
        """When that changed last."""
        self._prospect = Prospect()
        self._crowds: dict[int, _Crowd] = {}
        self._tried: _Crowd | None = None
        """Crowd whose slower way is being tried."""

    @property
    def is_open(self) -> bool:
        """Whether sequences should draft at the current load."""
        crowd = self._crowd(self._size)
        return crowd.is_worth != (self._tried is crowd)

    @property
    def state(self) -> PolicyState:
        """The decision at the present load. Safe to read from another thread."""
        crowd = self._crowds.get(self._size)
        if crowd is None:
            return PolicyState(self._size == 0, 0.0, "not measured yet at this load")
        is_trial = self._tried is crowd
        speedup = 0.0 if crowd.gain is None else math.exp(crowd.gain)
        if is_trial:
            reason = "trying decoding without speculation" if crowd.is_worth else "trying drafts"
        elif crowd.gain is None:
            reason = "not measured yet at this load"
        else:
            reason = f"expected {speedup:.2g} of decoding without speculation"
        return PolicyState(crowd.is_worth != is_trial, speedup, reason)

    def learn(self, step: Step) -> None:
        """Learn from a drafted step made while the policy is off, as of a named drafter: what drafts bring and cost."""
        self._prospect.add(step.num_tokens, step.num_rows, step.waiting_s, self._size)

    def record(self, step: Step) -> None:
        """A sequence that went the present way, by drafts or without, got tokens."""
        crowd, num_running = self._crowd(self._size), max(1, self._num_running())
        if self._tried is not None and self._tried is not crowd:  # speeds of unlike crowds do not compare
            self._tried.patience *= 2.0  # or numbers that waver would be tried for ever
            self._tried.is_worth |= not self._tried.is_judged
            self._tried.begin_anew()
            self._tried = None
        if self._way != self.is_open:  # another crowd than before
            self._turn(step.now_s)
        if step.started_s < self._since_s:  # part of it was the other way
            return
        if self._way:
            self._prospect.add(step.num_tokens, step.num_rows, step.waiting_s, self._size)
        speed = crowd.with_drafts if self._way else crowd.without
        speed.add(step.num_tokens, step.now_s - step.started_s, _MEMORY_S * num_running)
        crowd.num_commits += 1
        crowd.busy_s += (step.now_s - step.started_s) / num_running
        if crowd.num_commits >= _LEAST_COMMITS * num_running:
            expected = self._expected(crowd, num_running, step.row_s)
            if self._tried is None:
                self._weigh(crowd, num_running, expected, step.now_s)
            else:
                self._judge(crowd, expected, step.now_s)

    def _weigh(self, crowd: _Crowd, num_running: int, expected: float, now_s: float) -> None:
        """Go the other way if that is expected to be faster, or try it."""
        gain, error = crowd.believed(expected)
        is_clear = crowd.evidence_s == 0.0 or abs(gain) > 2.0 * error
        crowd.is_judged |= expected != 0.0
        if expected or crowd.evidence_s:
            crowd.gain = gain
        if expected and is_clear and crowd.is_worth != (gain > 0.0):
            crowd.is_worth = not crowd.is_worth
        else:
            least_s = _LEAST_LONE_PAUSE_S if num_running == 1 else _LEAST_PAUSE_S
            lost_s = crowd.trial_s * (1.0 - math.exp(-abs(gain)))
            if crowd.busy_s < crowd.patience * min(_LONGEST_PAUSE_S, max(least_s, lost_s / _TRIAL_SHARE)):
                return
            self._tried = crowd
            crowd.usual_s = min(_MOST_EVIDENCE_S, crowd.usual_s + crowd.busy_s)
            if crowd.is_worth:
                crowd.without = TimeDecayedRate()
            else:
                crowd.with_drafts = TimeDecayedRate()
        crowd.begin_anew()
        self._turn(now_s)

    def _judge(self, crowd: _Crowd, expected: float, now_s: float) -> None:
        """End the trial once it is conclusive, or has lasted long."""
        with_drafts, without = crowd.with_drafts.mean, crowd.without.mean
        if min(with_drafts, without) <= 0.0:
            return
        measured = math.log(with_drafts / without)
        gain, error = crowd.believed(expected, measured, crowd.busy_s)
        is_clear = abs(gain) > 2.0 * error and (gain > 0.0) == (measured > 0.0)
        if not is_clear and crowd.busy_s < _LONGEST_TRIAL_S:
            return
        crowd.learn(expected, measured, crowd.busy_s)
        crowd.gain = gain
        crowd.trial_s, crowd.patience, self._tried = crowd.busy_s, 1.0, None
        crowd.begin_anew()
        crowd.is_worth, crowd.is_judged = gain > 0.0, True
        if self._way != crowd.is_worth:
            self._turn(now_s)

    def _expected(self, crowd: _Crowd, num_running: int, row_s: float) -> float:
        """Gain by the rounds so far and the price of a row; 0 while one of the numbers is missing."""
        if crowd.without.mean <= 0.0 or row_s <= 0.0:
            return 0.0
        return self._prospect.gain(num_running, 1.0 / crowd.without.mean, row_s, self._size)

    @property
    def _size(self) -> int:
        """The number of running sequences, log2, to the nearest whole number."""
        return round(math.log2(max(1, self._num_running())))

    def _crowd(self, size: int) -> _Crowd:
        """A crowd as the nearest that is known. Several begin without drafts: what these are expected to gain is known
        once the speed without them is."""
        if (crowd := self._crowds.get(size)) is None:
            nearest = min(self._crowds, key=lambda other: abs(other - size), default=None)
            crowd = self._crowds[size] = _Crowd(is_worth=size == 0)
            if nearest is not None:
                known = self._crowds[nearest]
                kept = min(1.0, _EXPECTATION_S / max(known.evidence_s, _EXPECTATION_S))
                crowd.surprise, crowd.evidence_s = kept * known.surprise, kept * known.evidence_s
        return crowd

    def _turn(self, now_s: float) -> None:
        self._way, self._since_s = not self._way, now_s
