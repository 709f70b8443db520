"""Which source drafts for a sequence: the source with the highest measured token rate at the present load.

Rates are kept by load level, of all sequences of a kind and of each one; the former are the prior of the latter. A
sequence changes its source seldom. Now and then it tries another one, at a bounded share of the tokens. Knows keys of
sources, tokens and seconds; no clock, drafter or link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

SourceT = TypeVar("SourceT", bound=Hashable)

_MEMORY_TOKENS, _SEQUENCE_MEMORY_TOKENS = 2000, 500
"""Tokens in which the weight of a measurement falls to 1 / e, of all sequences and of one."""
_RELAX_TOKENS = 4000
"""Tokens of other sources in which the weight of a measurement falls to 1 / e."""
_PRIOR_TOKENS, _SEQUENCE_PRIOR_TOKENS = 8.0, 64.0
"""Weight of the fastest source's rate for a source, and of the rate of all sequences for one."""
_LONGEST_STEP = 32.0
"""Longest step that counts in full, over the time of a token."""
_COOL_DOWN_TOKENS = 64
"""Tokens of a sequence between two changes of its source."""
_CHOICE_TOKENS = 16
"""Tokens of a sequence between two choices."""
_LEAST_GAIN = 1.05
"""Rate over the present source's from which a sequence changes."""
_TRIAL_TOKENS, _LONGEST_TRIAL_TOKENS = 64, 128
"""Measured tokens of a trial, and tokens after which it ends without them."""
_TRIAL_SHARE = 0.02
"""Share of the tokens that trials may cost, all together."""
_PREFILL_COST = 0.05
"""Cost of a token that a source has to compute before its first draft, in tokens."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 512.0, 20000.0
"""Tokens of all sequences between two trials of a source."""


class Candidate(NamedTuple):
    """A source that can draft for a sequence at present."""

    num_missing: int = 0
    """Tokens that it has to compute before its first draft."""
    is_on: bool = True
    """Whether the speculation policy lets it draft; otherwise its sequences decode without speculation."""
    trial_loss: Callable[[], float] = lambda: 0.0
    """Returns the batch's loss in tokens per token of a sequence that drafts while the others decode."""


@dataclass(slots=True)
class _Evidence:
    """Tokens, and the seconds that they took; both lose weight."""

    num_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, num_tokens: int, seconds: float, memory_tokens: float) -> None:
        self.fade(num_tokens / memory_tokens)
        self.num_tokens += num_tokens
        self.seconds += seconds

    def fade(self, share: float) -> None:
        kept = math.exp(-share)
        self.num_tokens *= kept
        self.seconds *= kept

    def token_s(self, prior_s: float = 0.0, weight: float = 0.0) -> float:
        """Seconds per token; `prior_s`: seconds per token of a prior, with a `weight` in tokens."""
        return (self.seconds + weight * prior_s) / max(1e-9, self.num_tokens + weight)


class SourceRates(Generic[SourceT]):
    """Token rates of the sources of one kind of requests. The source None is decoding without speculation."""

    def __init__(self) -> None:
        self._levels: dict[int, dict[SourceT | None, _Evidence]] = {}
        self._num_tokens = 0
        """Tokens of all sequences."""
        self._used_at: dict[SourceT | None, int] = {}
        """`_num_tokens` when each source was used last."""

    def open(self) -> SequenceRates[SourceT]:
        """Return the rates of a new sequence."""
        return SequenceRates(self)

    def add_tokens(self, num_tokens: int) -> None:
        """Add committed tokens of any sequence."""
        self._num_tokens += num_tokens

    def add(self, source: SourceT | None, level: int, num_tokens: int, seconds: float) -> float:
        """Add a step of a sequence; return its time without pauses of the machine, seconds."""
        known = self._levels.setdefault(level, {})
        own = known.setdefault(source, _Evidence())
        if own.num_tokens:
            seconds = min(seconds, _LONGEST_STEP * own.token_s())
        for name, other in known.items():
            if name != source:
                other.fade(num_tokens / _RELAX_TOKENS)
        own.add(num_tokens, seconds, _MEMORY_TOKENS)
        self.use(source)
        return seconds

    def use(self, source: SourceT | None) -> None:
        """Note that a source drafts now."""
        self._used_at[source] = self._num_tokens

    def is_new(self, source: SourceT) -> bool:
        """Whether a source was never used."""
        return source not in self._used_at

    def num_passed(self, source: SourceT) -> int:
        """Tokens of all sequences since a source was used last."""
        return self._num_tokens - self._used_at.get(source, 0)

    def token_s(self, source: SourceT | None, level: int) -> float | None:
        """Return the expected seconds per token; None if the source was not measured.

        If it was measured at other loads only, its ratio to a source measured at both is taken as the same.
        """
        measured = (other for other, known in self._levels.items() if source in known)
        levels = sorted(measured, key=lambda other: (abs(other - level), other))
        if not levels:
            return None
        known = self._levels[levels[0]]
        fastest_s = min(evidence.token_s() for evidence in known.values())
        token_s = known[source].token_s(fastest_s, _PRIOR_TOKENS)
        here = {name: one for name, one in self._levels.get(level, {}).items() if name in known}
        if levels[0] == level or not here:
            return token_s
        common = max(here, key=lambda name: here[name].num_tokens)
        return token_s * here[common].token_s() / max(1e-9, known[common].token_s())


class SequenceRates(Generic[SourceT]):
    """Selects the source of one sequence from its own rates and the rates of all sequences."""

    def __init__(self, rates: SourceRates[SourceT]) -> None:
        self.current: SourceT | None = None
        """Source at present; None before the first choice, and without a candidate."""
        self.base: SourceT | None = None
        """Source before the trial that is under way; None without a trial."""
        self._rates = rates
        self._own: dict[SourceT | None, _Evidence] = {}
        self._level = 0
        self._num_tokens = self._num_measured = self._num_since_choice = 0
        """Tokens since the last change, measured tokens since then, and tokens since the last choice."""

    @property
    def is_due(self) -> bool:
        """Whether enough tokens have passed since the last choice for another one."""
        return self.current is None or self._num_since_choice >= _CHOICE_TOKENS

    def add_tokens(self, num_tokens: int) -> None:
        """Add committed tokens."""
        self._num_tokens += num_tokens
        self._num_since_choice += num_tokens
        self._rates.add_tokens(num_tokens)

    def add(self, source: SourceT | None, level: int, num_tokens: int, seconds: float) -> None:
        """Add a step that `source` drafted for; None = decoding without speculation."""
        seconds = self._rates.add(source, level, num_tokens, seconds)
        if level != self._level:
            self._own.clear()
            self._level = level
        self._own.setdefault(source, _Evidence()).add(num_tokens, seconds, _SEQUENCE_MEMORY_TOKENS)
        if source == self.current:
            self._num_measured += num_tokens

    def choose(self, candidates: Mapping[SourceT, Candidate], level: int) -> SourceT | None:
        """Select the next source: the present one, the fastest, or one to try.

        `candidates`: in order of preference while nothing is measured.
        """
        self._num_since_choice = 0
        current = self.current
        if not candidates:
            self._change(None)
        elif current is None or current not in candidates:
            self._change(self._fastest(candidates, level))
            self._try_other(candidates, level)
        elif self.base is not None:
            if self._num_measured >= _TRIAL_TOKENS or self._num_tokens >= _LONGEST_TRIAL_TOKENS:
                self._end_trial(candidates, level)
        elif self._num_tokens >= _COOL_DOWN_TOKENS:
            fastest = self._fastest(candidates, level)
            if self._value(fastest, candidates, level) > _LEAST_GAIN * self._value(current, candidates, level):
                self._change(fastest)
            else:
                self._try_other(candidates, level)
        return self.current

    def _end_trial(self, candidates: Mapping[SourceT, Candidate], level: int) -> None:
        """Keep the tried source if it is faster than the one before."""
        base, self.base = self.base, None
        if base is None or base not in candidates:
            return
        if self._rate(self.current, level) <= _LEAST_GAIN * self._value(base, candidates, level):
            self._change(base)

    def _try_other(self, candidates: Mapping[SourceT, Candidate], level: int) -> None:
        """Begin a trial of the first source that is due for one. What a trial is expected to cost sets its pause."""
        current = self.current
        if current is None or (present := self._value(current, candidates, level)) <= 0.0:
            return
        share = _TRIAL_SHARE / max(1, len(candidates) - 1)
        for source, candidate in candidates.items():
            is_new, num_passed = self._rates.is_new(source), self._rates.num_passed(source)
            shortest = 0.0 if is_new else _SHORTEST_PAUSE
            if source == current or num_passed < shortest:
                continue
            ratio = 1.0 if is_new else min(1.0, self._rate(source, level) / present)
            num_missing = max(0, candidate.num_missing - candidates[current].num_missing)
            lost = _TRIAL_TOKENS * max(1.0 - ratio, candidate.trial_loss()) + _PREFILL_COST * num_missing
            if num_passed >= min(_LONGEST_PAUSE, max(shortest, lost / share)):
                self._change(source)
                self.base = current
                return

    def _fastest(self, candidates: Mapping[SourceT, Candidate], level: int) -> SourceT:
        return max(candidates, key=lambda source: self._value(source, candidates, level))

    def _value(self, source: SourceT, candidates: Mapping[SourceT, Candidate], level: int) -> float:
        """Tokens per second of the sequence with this source, decoded without drafts while they do not pay; 0 = not
        known."""
        rate = self._rate(source, level)
        if candidates[source].is_on and (rate or self._rates.is_new(source)):
            return rate
        return self._rate(None, level) or rate

    def _rate(self, source: SourceT | None, level: int) -> float:
        """Tokens per second if the source drafts; 0 = not known."""
        prior_s = self._rates.token_s(source, level)
        if prior_s is None:
            return 0.0
        own = self._own.get(source) if level == self._level else None
        return 1.0 / max(1e-9, own.token_s(prior_s, _SEQUENCE_PRIOR_TOKENS) if own is not None else prior_s)

    def _change(self, source: SourceT | None) -> None:
        self.current, self.base = source, None
        self._num_tokens = self._num_measured = 0
        if source is not None:
            self._rates.use(source)
