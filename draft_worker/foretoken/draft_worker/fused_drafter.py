"""Per sequence and round, the hosted drafter that is expected to bring most tokens per second.

A round is timed from its request to the commit that ends it, so that a rate counts drafting, verifying and all between.
Knows drafters by their protocol only; they are stepped by whoever hosts them.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foretoken.draft_worker.drafter import Drafted, Drafter, DraftSequence
from foretoken.draft_worker.drafter_settings import check_names

_DECAY = 0.9
"""Weight of the past, per round of a source."""
_PRIOR_WEIGHT = 0.2
"""Weight, for a new sequence, of what other sequences taught."""
_TRIAL_SHARE = 0.03
"""Part of the time that trying other sources may cost, all together."""
_TRIAL_ROUNDS = 2
"""A trial's first round is not counted, its second is."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 200
"""Rounds from one trial of a source to the next."""

_MAX_UNCOUNTED = 64
"""Requests of a source before one must have counted; sequences may all begin at once."""
_NO_SPEED = 1e-30


@dataclass(slots=True)
class Rate:
    """Decayed tokens and time of one source."""

    tokens: float = 0.0
    ns: float = 0.0

    def add(self, num_tokens: int, duration_ns: int) -> None:
        self.tokens = _DECAY * self.tokens + num_tokens
        self.ns = _DECAY * self.ns + duration_ns

    @property
    def tokens_per_ns(self) -> float:
        """0 before the first round."""
        return self.tokens / self.ns if self.ns else 0.0


@dataclass(slots=True)
class _Source:
    """One drafter as one sequence sees it."""

    drafter: Drafter
    sequence: DraftSequence
    """The drafter's own view of the sequence; the id lists are shared with it."""
    rate: Rate
    is_open: bool = False
    """Whether the drafter has it; not before it is asked, so that what is never asked costs nothing."""
    last_round: int = 0
    """When it was the fastest, or was tried."""


@dataclass(slots=True)
class _Fused:
    """An open sequence."""

    sources: dict[str, _Source]
    num_rounds: int = 0
    is_asked: bool = False
    """Whether a round is under way."""
    asked: str = ""
    """Who drafts in the round under way, or drafted in the last one."""
    asked_ns: int = 0
    is_fresh: bool = False
    """Whether `asked` did not draft the round before too. Such a round is not counted: it includes the prefill of the
    prompt, or of what was committed while others drafted."""


class FusedDrafter:
    """Composes drafters that are hosted beside it; it has no settings."""

    def __init__(self, sources: Mapping[str, Drafter], clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._sources = dict(sources)
        self._clock_ns = clock_ns
        self._rates = {name: Rate() for name in self._sources}
        self._num_uncounted = dict.fromkeys(self._sources, 0)
        """Requests in a row that came to nothing."""
        self._open: dict[DraftSequence, _Fused] = {}

    @property
    def has_work(self) -> bool:
        """Never: the sources have it."""
        return False

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        fused = self._open[sequence] = _Fused({})
        for name, drafter in self._sources.items():
            prior = self._rates[name]
            rate = Rate(prior.tokens * _PRIOR_WEIGHT, prior.ns * _PRIOR_WEIGHT)
            fused.sources[name] = _Source(drafter, copy.copy(sequence), rate)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        fused = self._open[sequence]
        for source in fused.sources.values():
            if source.is_open:
                source.drafter.commit(source.sequence, ids)
        if fused.is_asked:
            self._learn(fused, len(ids))
            fused.is_asked = False

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        fused = self._open[sequence]
        name = self._choose(fused)
        fused.is_fresh = name != fused.asked
        fused.is_asked, fused.asked, fused.asked_ns = True, name, self._clock_ns()
        self._num_uncounted[name] += 1
        source = fused.sources[name]
        if not source.is_open:
            source.drafter.open(source.sequence)
            source.is_open = True
        source.sequence.takes_trees = sequence.takes_trees
        source.drafter.request(source.sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        fused = self._open.pop(sequence, None)
        if fused is not None:
            for source in fused.sources.values():
                if source.is_open:
                    source.drafter.close(source.sequence)

    def step(self) -> list[Drafted]:
        return []

    def check_integrity(self) -> None:
        """The sources account for what they hold."""

    def _choose(self, fused: _Fused) -> str:
        """The fastest source, or one that is due to be tried again; each for two rounds, of which the second counts."""
        fused.num_rounds += 1
        if fused.is_fresh:
            return fused.asked
        unknown = [name for name, source in fused.sources.items() if self._is_unknown(name, source)]
        if unknown:
            return unknown[0]
        fastest = max(fused.sources, key=lambda name: fused.sources[name].rate.tokens_per_ns)
        most = max(fused.sources[fastest].rate.tokens_per_ns, _NO_SPEED)
        fused.sources[fastest].last_round = fused.num_rounds
        for name, source in fused.sources.items():
            if fused.num_rounds - source.last_round >= self._pause(source.rate.tokens_per_ns / most):
                source.last_round = fused.num_rounds
                return name
        return fastest

    def _is_unknown(self, name: str, source: _Source) -> bool:
        """Whether it is to be tried first; one that raises every time would for ever be."""
        return not source.rate.ns and not self._rates[name].ns and self._num_uncounted[name] < _MAX_UNCOUNTED

    def _pause(self, speed: float) -> float:
        """Rounds after which a source is tried again: its trials cost no more than its part of `_TRIAL_SHARE`.

        `speed`: its rate over the fastest source's.
        """
        share = _TRIAL_SHARE / max(1, len(self._sources) - 1)
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _TRIAL_ROUNDS * (1.0 - speed) / share))

    def _learn(self, fused: _Fused, num_tokens: int) -> None:
        if not fused.is_fresh:
            duration_ns = max(1, self._clock_ns() - fused.asked_ns)
            fused.sources[fused.asked].rate.add(num_tokens, duration_ns)
            self._rates[fused.asked].add(num_tokens, duration_ns)
            self._num_uncounted[fused.asked] = 0
