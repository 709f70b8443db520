"""Per sequence and round, the hosted drafter that is expected to bring most tokens per second.

Tokens per round are the sequence's own, time per round is that of all sequences. A round is timed from its request to
the commit that ends it, so that it counts drafting, verifying and all between. What a drafter that answers at once
would have brought is also learnt while another drafts: its drafts cost nothing, and the target says the rest.
Knows drafters by their protocol only; they are stepped by whoever hosts them.
"""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from foretoken.draft_worker.drafter import Drafted, Drafter, DraftSequence
from foretoken.draft_worker.drafter_settings import check_names
from foretoken.draft_worker.immediate_drafter import ImmediateDrafter
from foretoken.draft_worker.shadow_draft import ShadowDraft

logger = logging.getLogger(__name__)

_DECAY = 0.9
"""Weight of the past, per round of a source in a sequence."""
_COMMON_DECAY = 0.98
"""The same over all sequences."""
_PRIOR_ROUNDS = 2.0
"""What other sequences taught counts as so many rounds of a new one."""
_TRIAL_SHARE = 0.03
"""Part of the time that trying other sources may cost, all together."""
_TRIAL_ROUNDS = 2
"""A trial's first round is not counted, its second is."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 200
"""Rounds from one trial of a source to the next."""

_MAX_UNCOUNTED = 64
"""Requests of a source before one must have counted; sequences may all begin at once."""
_NO_SPEED = 1e-30
"""Stands for the fastest rate while no source was timed."""


@dataclass(slots=True)
class Rounds:
    """Decayed sums over rounds of one source."""

    decay: float
    tokens: float = 0.0
    num: float = 0.0
    ns: float = 0.0
    num_timed: float = 0.0
    """Rounds that `ns` counts; those of shadow drafts have no time."""

    def add(self, num_tokens: int, duration_ns: int | None) -> None:
        self.tokens = self.decay * self.tokens + num_tokens
        self.num = self.decay * self.num + 1
        if duration_ns is not None:
            self.ns = self.decay * self.ns + duration_ns
            self.num_timed = self.decay * self.num_timed + 1

    @property
    def mean_tokens(self) -> float:
        """0 before the first round."""
        return self.tokens / self.num if self.num else 0.0

    @property
    def mean_ns(self) -> float:
        """0 before the first timed round."""
        return self.ns / self.num_timed if self.num_timed else 0.0


@dataclass(slots=True)
class _Source:
    """One drafter as one sequence sees it."""

    drafter: Drafter
    sequence: DraftSequence
    """The drafter's own view of the sequence; the id lists are shared with it."""
    rounds: Rounds
    is_open: bool = False
    """Whether the drafter has it; not before it is to draft, so that what is never asked costs nothing."""
    last_round: int = 0
    """When it was the fastest, was tried, or a shadow draft of it ended."""
    num_wanted: int = 0
    """Tokens of the shadow draft to be made; 0 = none."""
    shadow: ShadowDraft | None = None


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
        self._common = {name: Rounds(_COMMON_DECAY) for name in self._sources}
        self._num_uncounted = dict.fromkeys(self._sources, 0)
        """Requests in a row that came to nothing."""
        self._open: dict[DraftSequence, _Fused] = {}
        self._num_wanted = 0
        """Shadow drafts to be made."""

    @property
    def has_work(self) -> bool:
        """Whether shadow drafts are to be made: while no source drafts, so that none has to wait for them."""
        return self._num_wanted > 0 and not any(drafter.has_work for drafter in self._sources.values())

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        fused = self._open[sequence] = _Fused({})
        for name, drafter in self._sources.items():
            common = self._common[name]
            rounds = Rounds(_DECAY, tokens=_PRIOR_ROUNDS * common.mean_tokens, num=_PRIOR_ROUNDS if common.num else 0.0)
            fused.sources[name] = _Source(drafter, copy.copy(sequence), rounds)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        fused = self._open[sequence]
        for name, source in fused.sources.items():
            self._follow(name, source, ids, fused.num_rounds)
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
        for other, source in fused.sources.items():
            source.sequence.takes_trees = sequence.takes_trees
            if other != name and source.shadow is None and isinstance(source.drafter, ImmediateDrafter):
                self._num_wanted += source.num_wanted == 0
                source.num_wanted = num_tokens
        self._forget_wanted(fused.sources[name])
        self._opened(fused.sources[name]).request(fused.sources[name].sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        fused = self._open.pop(sequence, None)
        if fused is not None:
            for source in fused.sources.values():
                self._forget_wanted(source)
                if source.is_open:
                    source.drafter.close(source.sequence)

    def step(self) -> list[Drafted]:
        """Make the shadow drafts; they are no answers."""
        for fused in self._open.values():
            for name, source in fused.sources.items():
                if source.num_wanted:
                    self._draft_shadow(name, source)
        return []

    def check_integrity(self) -> None:
        """The sources account for what they hold."""

    def _choose(self, fused: _Fused) -> str:
        """The fastest source, or one that is due to be tried again; each for two rounds, of which the second counts."""
        fused.num_rounds += 1
        if fused.is_fresh:
            return fused.asked
        unknown = [name for name in fused.sources if self._is_unknown(name)]
        if unknown:
            return unknown[0]
        speeds = {name: self._speed(name, source) for name, source in fused.sources.items()}
        fastest = max(speeds, key=lambda name: speeds[name])
        most = max(speeds[fastest], _NO_SPEED)
        fused.sources[fastest].last_round = fused.num_rounds
        for name, source in fused.sources.items():
            if fused.num_rounds - source.last_round >= self._pause(speeds[name] / most):
                source.last_round = fused.num_rounds
                return name
        return fastest

    def _speed(self, name: str, source: _Source) -> float:
        """Expected tokens per nanosecond; 0 while no round was timed."""
        mean_ns = self._common[name].mean_ns
        return source.rounds.mean_tokens / mean_ns if mean_ns else 0.0

    def _is_unknown(self, name: str) -> bool:
        """Whether it is to be tried first; one that raises every time would for ever be."""
        return not self._common[name].num_timed and self._num_uncounted[name] < _MAX_UNCOUNTED

    def _pause(self, speed: float) -> float:
        """Rounds after which a source is tried again: its trials cost no more than its part of `_TRIAL_SHARE`.

        `speed`: its rate over the fastest source's.
        """
        share = _TRIAL_SHARE / max(1, len(self._sources) - 1)
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _TRIAL_ROUNDS * (1.0 - speed) / share))

    def _learn(self, fused: _Fused, num_tokens: int) -> None:
        if not fused.is_fresh:
            duration_ns = max(1, self._clock_ns() - fused.asked_ns)
            fused.sources[fused.asked].rounds.add(num_tokens, duration_ns)
            self._common[fused.asked].add(num_tokens, duration_ns)
            self._num_uncounted[fused.asked] = 0

    @staticmethod
    def _opened(source: _Source) -> Drafter:
        if not source.is_open:
            source.drafter.open(source.sequence)
            source.is_open = True
        return source.drafter

    def _draft_shadow(self, name: str, source: _Source) -> None:
        num_tokens = source.num_wanted
        self._forget_wanted(source)
        try:
            drafter = self._opened(source)
            assert isinstance(drafter, ImmediateDrafter), "shadow drafts are wanted of such only"
            drafted = drafter.propose(source.sequence, num_tokens)
            drafted.check()
        except Exception:  # as when it is asked, it costs nobody's stream
            logger.exception("drafter %s failed", name)
            return
        source.shadow = ShadowDraft(drafted)

    def _forget_wanted(self, source: _Source) -> None:
        self._num_wanted -= source.num_wanted > 0
        source.num_wanted = 0

    def _follow(self, name: str, source: _Source, ids: list[int], num_rounds: int) -> None:
        """Learn from a shadow draft that has ended; one that was not made in time is dropped."""
        self._forget_wanted(source)
        if source.shadow is not None and (num_tokens := source.shadow.follow(ids)) is not None:
            source.rounds.add(num_tokens, None)
            self._common[name].add(num_tokens, None)
            source.last_round = num_rounds
            source.shadow = None
