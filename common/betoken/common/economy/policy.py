"""The speculation policy: whether sequences of one kind draft at the present load.

Drafts cost more than their own time: their tokens delay every sequence, and a draft worker may share the verify
worker's processor. Sequences that weigh only their own gain would keep drafting although all would be faster without.
So all sequences of a kind draft or none does. The policy expects a gain from costs and realised accepts and corrects it
by exploration: it compares average token rates over many rounds, never two single rounds. Knows times and numbers of
tokens only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from betoken.common.economy.draft_length import RoundTime, SequenceDraftLength
from betoken.common.economy.expected_gain import ExpectedGain
from betoken.common.economy.means import TimeDecayedRate
from betoken.common.economy.opening_time import OpeningTime
from betoken.common.step_times import NO_TIMES, ForwardTimes

_USUAL_STEP_S = 0.0025
"""Decode step of the times below, seconds; slower models have proportionally longer ones."""
_MEMORY_S = 2.0
"""Time in which the weight of an observation falls to 1 / e, per running sequence."""
_LEAST_COMMITS = 4
"""Commits per running sequence before a rate counts."""
_NOISE = 0.07
"""Standard deviation of the log of a rate measured for a second. Measured: two of 0.15 s differ by 0.25."""
_EXPECTATION_S = 0.2
"""Weight of the expectation, as seconds of exploration."""
_LEAST_MEASURED_S = 0.1
"""Seconds of both sides before their rates are compared."""
_LEAST_GAIN = 0.03
"""log(speed with drafts / speed without) from which sequences draft."""
_MOST_EVIDENCE_S = 0.5
"""Seconds of exploration that count at most, so that a change is noticed."""
_USUAL_TRIAL_S, _LONGEST_TRIAL_S = 0.15, 0.3
"""Expected and longest duration of a trial, seconds."""
_LONGEST_STEP = 32.0
"""Longest step that counts in full, over the time of a token."""
_STEP_TIME_S = 0.05
"""Weight of a worker's step time against measured gaps, seconds."""
_TRIAL_SHARE = 0.01
"""Share of the tokens that exploration may cost."""
_LEAST_PAUSE_S, _LEAST_LONE_PAUSE_S, _LONGEST_PAUSE_S = 0.15, 1.0, 60.0
"""Busy time between trials; the second of a lone sequence."""
_RELAX_TOKENS = 4000
"""Tokens without drafts in which the evidence about drafts moves to the prior, to 1 / e of its distance."""


@lru_cache(maxsize=4096)
def load_level(num_running: int) -> int:
    """Return the level of a load: the number of running sequences, log2, to the nearest whole number."""
    return round(math.log2(max(1, num_running)))


class Step(NamedTuple):
    """One round of a sequence, or one decode step."""

    started_s: float
    now_s: float
    num_tokens: int
    num_rows: int = 1
    """The token before, and its draft tokens."""
    waiting_s: float = 0.0
    """Wait for its draft."""
    times: ForwardTimes = NO_TIMES
    """Times of forwards at present."""


class PolicyState(NamedTuple):
    """Whether sequences of a kind draft now, and why."""

    is_on: bool
    expected_speedup: float
    """Speed with drafts over the speed without; 0 = not known yet."""
    reason: str


@dataclass(slots=True)
class LoadLevel:
    """Measurements for a number of running sequences, to the nearest power of two."""

    is_on: bool
    """Whether drafts pay."""
    is_measured: bool = False
    """Whether that was found, not assumed."""
    gain: float | None = None
    """log(speed with drafts / speed without) at the last decision; None before that."""
    bias: float = 0.0
    """Sum over trials of measured minus expected gain, by seconds of trial."""
    evidence_s: float = 0.0
    """Seconds of trials behind it."""
    with_drafts: TimeDecayedRate = field(default_factory=TimeDecayedRate)
    """Token rate with drafts."""
    without: TimeDecayedRate = field(default_factory=TimeDecayedRate)
    """Token rate without drafts."""
    num_commits: int = 0
    """Commits since the last trial began or ended."""
    busy_s: float = 0.0
    """Busy time since then."""
    usual_s: float = 0.0
    """Busy time before the last trial, seconds, at most one."""
    trial_s: float = _USUAL_TRIAL_S
    """Duration of the last trial, seconds."""
    backoff: float = 1.0
    """Factor of the pause to the next trial; inconclusive trials double it."""
    time_scale: float = 1.0
    """Decode step over `_USUAL_STEP_S`, at least 1; all times of this level are divided by it."""

    def restart(self) -> None:
        """A trial begins or ends."""
        self.num_commits, self.busy_s = 0, 0.0

    def believed(self, expected: float, measured: float = 0.0, trial_s: float = 0.0) -> tuple[float, float]:
        """Return log(speed with drafts / speed without) and its standard error: the expectation, corrected by the
        trials and the running one."""
        total_s = _EXPECTATION_S + self.evidence_s + trial_s
        gain = expected + (self.bias + trial_s * (measured - expected)) / total_s
        usual_s = self.usual_s + _EXPECTATION_S  # the rate it is compared with is as noisy
        return gain, _NOISE * math.sqrt(1.0 / total_s + 1.0 / usual_s)

    def present(self, expected: float, num_running: int) -> tuple[float, float]:
        """Return log(speed with drafts / speed without) of the present side and the last of the other, and its weight,
        seconds."""
        seconds = min(self.with_drafts.seconds, self.without.seconds) / num_running / self.time_scale
        if min(self.with_drafts.mean, self.without.mean) <= 0.0 or seconds < _LEAST_MEASURED_S:
            return expected, 0.0
        return math.log(self.with_drafts.mean / self.without.mean), min(seconds, _MOST_EVIDENCE_S)

    def decode_s(self, times: ForwardTimes, num_running: int) -> float:
        """Return the time of a decode step: the measured gap between tokens and, as long as few were measured, the
        worker's step time; 0 = not known."""
        if self.without.mean <= 0.0:
            return times.decode_s
        weight = _STEP_TIME_S * num_running * self.time_scale if times.decode_s > 0.0 else 0.0
        seconds = self.without.seconds
        return (seconds / self.without.mean + weight * times.decode_s) / (seconds + weight)

    def learn(self, expected: float, measured: float, trial_s: float) -> None:
        """Add a finished trial."""
        self.bias += trial_s * (measured - expected)
        self.evidence_s += trial_s
        kept = min(1.0, _MOST_EVIDENCE_S / self.evidence_s)
        self.bias, self.evidence_s = kept * self.bias, kept * self.evidence_s


class SpeculationPolicy:
    """The policy of one kind of requests. A lone sequence drafts for a second before anything is tried."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        """`num_running`: running sequences of all kinds."""
        self._num_running = num_running
        self._counts_drafted = True
        """Whether the steps that count now are those with drafts."""
        self._since_s = -math.inf
        """When that changed last."""
        self._expected_gain = ExpectedGain()
        self._openings = OpeningTime()
        self._levels: dict[int, LoadLevel] = {}
        self._tried: LoadLevel | None = None
        """Level whose slower side is being tried."""

    @property
    def is_on(self) -> bool:
        """Whether sequences should draft at the current load."""
        level = self.level(self._size)
        return level.is_on != (self._tried is level)

    @property
    def state(self) -> PolicyState:
        """The decision at the present load. Safe to read from another thread."""
        level = self._levels.get(self._size)
        if level is None:
            return PolicyState(self._size == 0, 0.0, "not measured yet at this load")
        is_trial = self._tried is level
        speedup = 0.0 if level.gain is None else math.exp(level.gain)
        if is_trial:
            reason = "trying decoding without speculation" if level.is_on else "trying drafts"
        elif level.gain is None:
            reason = "not measured yet at this load"
        else:
            reason = f"expected {speedup:.2g} of decoding without speculation"
        return PolicyState(level.is_on != is_trial, speedup, reason)

    def open_sequence(self) -> SequenceDraftLength:
        """Return the draft length of a new sequence."""
        return self._expected_gain.lengths.open()

    @property
    def can_pause(self) -> bool:
        """Whether a sequence may pause drafting while others draft."""
        return self._expected_gain.can_pause

    def round_time(self, times: ForwardTimes) -> RoundTime | None:
        """Return the costs of a round at the present load; None while they are not known."""
        num_running = max(1, self._num_running())
        decode_s = self.level(self._size).decode_s(times, num_running)
        if decode_s <= 0.0 or times.token_s <= 0.0:
            return None
        return replace(self._expected_gain.round_time(decode_s, times.token_s, self._size), num_sequences=num_running)

    def add_draft(
        self, num_tokens: int, num_forwards: int, waited_s: float, drafting_s: float, *, is_hit: bool = False
    ) -> None:
        """Add the times of a draft that arrived. `is_hit`: it was made ahead."""
        self._expected_gain.add_draft(num_tokens, num_forwards, waited_s, drafting_s, self._size, is_hit=is_hit)

    def add_opening(self, num_tokens: int, seconds: float) -> None:
        """Add the time from the request for the first draft of a sequence of `num_tokens` until that came."""
        self._openings.add(num_tokens, seconds, self._size)

    def pays_opening(self, num_tokens: int, num_left: int, times: ForwardTimes) -> bool:
        """Return whether drafts for the `num_left` tokens of an answer save more time than opening its sequence of
        `num_tokens` on a draft worker takes."""
        level = self.level(self._size)
        if self._tried is level or level.gain is None:
            return True
        decode_s = level.decode_s(times, max(1, self._num_running()))
        saved_s = num_left * decode_s * (1.0 - math.exp(-level.gain))
        if self._openings.seconds(num_tokens, self._size, times.token_s) <= saved_s:
            return True
        self._openings.relax()
        return False

    def learn(self, step: Step) -> None:
        """Learn from a drafted step made while the policy is off, as of a named drafter: tokens and costs of drafts."""
        self._expected_gain.add(step.num_tokens, step.num_rows, step.waiting_s, self._size)

    def record(self, step: Step) -> None:
        """Add a step that was made as the policy wants it, with a draft or without."""
        level, num_running = self.level(self._size), max(1, self._num_running())
        if self._tried is not None and self._tried is not level:  # rates of unlike loads do not compare
            self._tried.backoff *= 2.0  # or a wavering load would be tried for ever
            self._tried.is_on |= not self._tried.is_measured
            self._tried.restart()
            self._tried = None
        if self._counts_drafted != self.is_on:  # another level than before
            self._turn(step.now_s)
        if step.started_s < self._since_s:  # part of it was made the other way
            return
        if self._counts_drafted:
            self._expected_gain.add(step.num_tokens, step.num_rows, step.waiting_s, self._size)
        else:
            self._expected_gain.relax(step.num_tokens / _RELAX_TOKENS)
        rate = level.with_drafts if self._counts_drafted else level.without
        elapsed_s = step.now_s - step.started_s
        if rate.mean > 0.0:  # a pause of the machine is not evidence about drafts
            elapsed_s = min(elapsed_s, _LONGEST_STEP / rate.mean)
        rate.add(step.num_tokens, elapsed_s, _MEMORY_S * num_running * level.time_scale)
        decode_s = level.decode_s(step.times, num_running)
        level.time_scale = max(1.0, decode_s / _USUAL_STEP_S)
        level.num_commits += 1
        level.busy_s += elapsed_s / num_running / level.time_scale
        # Once a step of the batch: the expectation takes longer than all the rest.
        if level.num_commits >= _LEAST_COMMITS * num_running and level.num_commits % num_running == 0:
            expected = self._expected(num_running, decode_s, step.times.token_s)
            if self._tried is None:
                self._decide(level, num_running, expected, step.now_s, step.times.token_s)
            else:
                self._judge(level, expected, step.now_s)

    def _decide(self, level: LoadLevel, num_running: int, expected: float, now_s: float, token_s: float) -> None:
        """Change to the side that is expected to be faster, or try the other one."""
        if num_running == 1 and not level.evidence_s and level.is_on and level.busy_s < _LEAST_LONE_PAUSE_S:
            return  # its first drafts are slow: pages, kernels and connections are new
        measured, measured_s = level.present(expected, num_running)
        gain, error = level.believed(expected, measured, measured_s)
        is_clear = (level.evidence_s == 0.0 and measured_s == 0.0) or abs(gain) > 2.0 * error
        level.is_measured |= expected != 0.0
        if expected or level.evidence_s:
            level.gain = gain
        if expected and is_clear and level.is_on != (gain > _LEAST_GAIN):
            level.is_on = not level.is_on
        else:
            least_s = _LEAST_LONE_PAUSE_S if num_running == 1 else _LEAST_PAUSE_S
            lost_s = level.trial_s * (1.0 - math.exp(-abs(gain)))
            if not level.is_on:
                lost_s += self._openings.mean_s(self._size, token_s) / level.time_scale
            if level.busy_s < level.backoff * min(_LONGEST_PAUSE_S, max(least_s, lost_s / _TRIAL_SHARE)):
                return
            self._tried = level
            level.usual_s = min(_MOST_EVIDENCE_S, level.usual_s + level.busy_s)
            if level.is_on:
                level.without = TimeDecayedRate()
            else:
                level.with_drafts = TimeDecayedRate()
        level.restart()
        self._turn(now_s)

    def _judge(self, level: LoadLevel, expected: float, now_s: float) -> None:
        """End the trial once it is conclusive, or has lasted long."""
        with_drafts, without = level.with_drafts.mean, level.without.mean
        if min(with_drafts, without) <= 0.0:
            return
        measured = math.log(with_drafts / without)
        gain, error = level.believed(expected, measured, level.busy_s)
        is_clear = abs(gain) > 2.0 * error and (gain > 0.0) == (measured > 0.0)
        if not is_clear and level.busy_s < _LONGEST_TRIAL_S:
            return
        level.learn(expected, measured, level.busy_s)
        level.gain = gain
        level.trial_s, level.backoff, self._tried = level.busy_s, 1.0, None
        level.restart()
        level.is_on, level.is_measured = gain > _LEAST_GAIN, True
        if self._counts_drafted != level.is_on:
            self._turn(now_s)

    def _expected(self, num_running: int, decode_s: float, token_s: float) -> float:
        """The gain by the rounds so far and the costs of a round; 0 while one of the numbers is missing."""
        if decode_s <= 0.0 or token_s <= 0.0:
            return 0.0
        return self._expected_gain.gain(num_running, decode_s, token_s, self._size)

    def trial_loss(self, times: ForwardTimes) -> float:
        """Return the batch's expected loss in tokens per token of one sequence that drafts while the others decode; 0
        while costs are unknown, and for a gain."""
        num_running = max(1, self._num_running())
        decode_s = self.level(self._size).decode_s(times, num_running)
        if decode_s <= 0.0 or times.token_s <= 0.0:
            return 0.0
        return max(0.0, self._expected_gain.trial_loss(num_running, decode_s, times.token_s, self._size))

    @property
    def is_known_off(self) -> bool:
        """Whether sequences do not draft at the current load because drafts were found not to pay."""
        level = self._levels.get(self._size)
        return level is not None and level.gain is not None and not self.is_on

    @property
    def _size(self) -> int:
        return load_level(self._num_running())

    def level(self, size: int) -> LoadLevel:
        """Return a load level; a new one begins like the nearest known. Several sequences begin without drafts: their
        expected gain is known once the speed without drafts is."""
        if (level := self._levels.get(size)) is None:
            nearest = min(self._levels, key=lambda other: abs(other - size), default=None)
            level = self._levels[size] = LoadLevel(is_on=size == 0)
            if nearest is not None:
                known = self._levels[nearest]
                kept = min(1.0, _EXPECTATION_S / max(known.evidence_s, _EXPECTATION_S))
                level.bias, level.evidence_s = kept * known.bias, kept * known.evidence_s
        return level

    def _turn(self, now_s: float) -> None:
        self._counts_drafted, self._since_s = not self._counts_drafted, now_s
