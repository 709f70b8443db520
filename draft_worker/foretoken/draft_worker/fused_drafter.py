"""Per sequence and round, the hosted drafter that is expected to bring most tokens per second.

A round is timed from its request to the commit that ends it, so that a rate counts drafting, verifying and all between.
Knows drafters by their protocol only; they are stepped by whoever hosts them.
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from foretoken.draft_worker.drafter import Drafted, Drafter, DraftSequence
from foretoken.draft_worker.drafter_settings import check_names

_DECAY = 0.9
"""Weight of the past, per round of a source."""
_PRIOR_WEIGHT = 0.2
"""Weight, for a new sequence, of what other sequences taught."""
_FIRST_PAUSE, _LONGEST_PAUSE = 8, 64
"""Rounds until a source that lost is tried again; doubled every time it loses once more."""


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
        """Infinite before the first round: what is not known is tried."""
        return self.tokens / self.ns if self.ns else float("inf")


@dataclass(slots=True)
class _Source:
    """One drafter as one sequence sees it."""

    drafter: Drafter
    sequence: DraftSequence
    """The drafter's own view of the sequence; the id lists are shared with it."""
    rate: Rate
    pause: int = _FIRST_PAUSE
    next_try: int = _FIRST_PAUSE


@dataclass(slots=True)
class _Fused:
    """An open sequence."""

    sources: dict[str, _Source]
    num_rounds: int = 0
    asked: str = ""
    """Who drafts in the round under way; empty between rounds."""
    asked_ns: int = 0
    used: set[str] = field(default_factory=set)
    """Sources that have drafted before: a source's first round includes its prefill and is not counted."""


class FusedDrafter:
    """Composes drafters that are hosted beside it; it has no settings."""

    def __init__(self, sources: Mapping[str, Drafter], clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._sources = dict(sources)
        self._clock_ns = clock_ns
        self._rates = {name: Rate() for name in self._sources}
        self._open: dict[DraftSequence, _Fused] = {}

    @property
    def has_work(self) -> bool:
        """Never: the sources have it."""
        return False

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        fused = self._open[sequence] = _Fused({})
        for name, drafter in self._sources.items():
            view = copy.copy(sequence)
            drafter.open(view)
            prior = self._rates[name]
            rate = Rate(prior.tokens * _PRIOR_WEIGHT, prior.ns * _PRIOR_WEIGHT)
            fused.sources[name] = _Source(drafter, view, rate)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        fused = self._open[sequence]
        for source in fused.sources.values():
            source.drafter.commit(source.sequence, ids)
        if fused.asked:
            self._learn(fused, len(ids))
            fused.asked = ""

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        fused = self._open[sequence]
        fused.asked, fused.asked_ns = self._choose(fused), self._clock_ns()
        source = fused.sources[fused.asked]
        source.sequence.takes_trees = sequence.takes_trees
        source.drafter.request(source.sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        fused = self._open.pop(sequence, None)
        if fused is not None:
            for source in fused.sources.values():
                source.drafter.close(source.sequence)

    def step(self) -> list[Drafted]:
        return []

    def check_integrity(self) -> None:
        """The sources account for what they hold."""

    def _choose(self, fused: _Fused) -> str:
        """The fastest source, or one that is due to be tried again."""
        fused.num_rounds += 1
        fastest = max(fused.sources, key=lambda name: fused.sources[name].rate.tokens_per_ns)
        for name, source in fused.sources.items():
            if name == fastest:
                source.pause, source.next_try = _FIRST_PAUSE, fused.num_rounds + _FIRST_PAUSE
            elif fused.num_rounds >= source.next_try:
                source.pause = min(2 * source.pause, _LONGEST_PAUSE)
                source.next_try = fused.num_rounds + source.pause
                return name
        return fastest

    def _learn(self, fused: _Fused, num_tokens: int) -> None:
        if fused.asked in fused.used:
            duration_ns = max(1, self._clock_ns() - fused.asked_ns)
            fused.sources[fused.asked].rate.add(num_tokens, duration_ns)
            self._rates[fused.asked].add(num_tokens, duration_ns)
        fused.used.add(fused.asked)
