"""Per sequence and round, the hosted drafter that is expected to bring most tokens per second.

Tokens per round are the sequence's own, time per round is that of all sequences. A round is timed from its request to
the commit that ends it. It includes drafting, verifying and the steps without a draft that may follow an empty one. A
drafter that answers at once is judged by its confidence in this very draft. Its drafts cost nothing, so its yield is
also learnt while another drafts: the target says the rest. Knows drafters by their protocol only; their host steps
them.
"""

import copy
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from betoken.common.economy.means import DecayedMean, RoundMeans
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.drafters.fused.shadow_draft import ShadowDraft
from betoken.drafters.immediate import ImmediateDrafter
from betoken.drafters.settings import check_names

logger = logging.getLogger(__name__)

_DECAY = 0.95
"""Weight of the past, per round of a source in a sequence."""
_COMMON_DECAY = 0.98
"""The same over all sequences."""
_PRIOR_ROUNDS = 8.0
"""What other sequences taught counts as so many rounds of a new one."""
_TRIAL_SHARE = 0.03
"""Part of the time that trying other sources may cost, all together."""
_TRIAL_ROUNDS = 2
"""Most rounds of a trial; where the first is not timed, the second is."""
_ROUNDS_AFTER_FIRST = 5
"""Rounds that bear the prompt's prefill, which a source's first round in a sequence includes."""
_MANY_MISSED = 32
"""Tokens whose prefill would make a round look slower than the source's rounds are."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 200
"""Rounds from one trial of a source to the next."""
_LONGEST_COMMON_PAUSE = 1000
"""The same over all sequences, for sources that have to prefill the prompt of the one they are tried in."""
_MOST_TIMES_USUAL = 8
"""What is learnt of a round's length at most, by the mean of its kind."""

_MAX_FAILED = 16
"""Failed rounds of a source in a row before it counts as broken."""
_NO_SPEED = 1e-30
"""Stands for the fastest rate while no source was timed."""


@dataclass(slots=True)
class _Source:
    """One drafter as one sequence sees it."""

    drafter: Drafter
    sequence: DraftSequence
    """The drafter's own view of the sequence; the id lists are shared with it."""
    tokens: RoundMeans
    is_open: bool = False
    """Whether the drafter has it: one that answers at once from the beginning, so that it can say how sure it is,
    others not before they are to draft, so that what is never asked costs nothing."""
    last_length: int = 0
    """Length of the sequence after the source's last round, tokens; 0 before the first."""
    last_round: int = 0
    """When it was the fastest or was tried."""
    num_wanted: int = 0
    """Tokens of the shadow draft to be made; 0 = none."""
    shadow: ShadowDraft | None = None
    shadow_confidence: int = 0


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
    num_asked: int = 0
    """Draft tokens at most."""
    asked_confidence: int = 0
    is_fresh: bool = False
    """Whether `asked` has not drafted here for long. Such a round is not timed: it includes the prefill of the prompt,
    or of what was committed while others drafted."""
    is_trial: bool = False
    """Whether `asked` drafts to be timed."""


class FusedDrafter:
    """Composes drafters that are hosted beside it; it takes no settings."""

    def __init__(self, sources: Mapping[str, Drafter], clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._sources = dict(sources)
        self._clock_ns = clock_ns
        self._tokens = {name: RoundMeans(_COMMON_DECAY) for name in self._sources}
        self._round_ns = {name: RoundMeans(_COMMON_DECAY) for name in self._sources}
        self._first_ns = {name: DecayedMean(_COMMON_DECAY) for name in self._sources}
        """Time of a source's first round in a sequence, ns."""
        self._num_passed: Counter[tuple[str, int]] = Counter()
        """Rounds of all sequences since a source was last tried, or timed, with a confidence it had in them."""
        self._num_failed = dict.fromkeys(self._sources, 0)
        """Failed rounds in a row."""
        self._last_closed: tuple[DraftSequence, str] | None = None
        """Sequence closed while its draft was pending, and its drafter. If it opens again, that drafter failed."""
        self._open: dict[DraftSequence, _Fused] = {}
        self._num_wanted = 0
        """Shadow drafts to be made."""

    @property
    def has_work(self) -> bool:
        """Whether shadow drafts are to be made: while no source drafts, so that none has to wait for them."""
        return self._num_wanted > 0 and not any(drafter.has_work for drafter in self._sources.values())

    def open(self, sequence: DraftSequence) -> None:
        check_names(sequence.settings, ())
        if self._last_closed is not None and self._last_closed[0] is sequence:
            self._num_failed[self._last_closed[1]] += 1
        fused = self._open[sequence] = _Fused({})
        for name, drafter in self._sources.items():
            tokens = RoundMeans(_DECAY, self._tokens[name], _PRIOR_ROUNDS)
            source = fused.sources[name] = _Source(drafter, copy.copy(sequence), tokens)
            if isinstance(drafter, ImmediateDrafter):
                self._open_early(name, source)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        fused = self._open[sequence]
        for name, source in fused.sources.items():
            self._follow(name, source, ids)
            if source.is_open:
                self._commit_source(name, source, ids)
        if fused.is_asked:
            self._learn(fused, len(ids))
            fused.is_asked = False

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        fused = self._open[sequence]
        if sequence.steers_tokens:
            self._request_first(fused, sequence, num_tokens)
            return
        for source in fused.sources.values():
            source.sequence.takes_trees, source.sequence.terms = sequence.takes_trees, sequence.terms
        name = self._choose(fused)
        asked = fused.sources[name]
        fused.is_fresh = not asked.is_open or len(sequence.ids) - asked.last_length > _MANY_MISSED
        fused.is_asked, fused.asked, fused.asked_ns = True, name, self._clock_ns()
        fused.num_asked = self._most_tokens(asked, num_tokens)
        for other, source in fused.sources.items():
            if other != name and source.shadow is None and isinstance(source.drafter, ImmediateDrafter):
                self._num_wanted += source.num_wanted == 0
                source.num_wanted = num_tokens
        self._forget_wanted(asked)
        drafter = self._opened(asked)
        fused.asked_confidence = self._confidence(asked)
        drafter.request(asked.sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        fused = self._open.pop(sequence, None)
        if fused is not None:
            self._last_closed = (sequence, fused.asked) if fused.is_asked else None
            # The router has given its draft up. One that is soon over, with its link or its client, says nothing.
            if fused.is_asked and sequence.is_waiting and self._round_so_far_ns(fused) > self._longest_ns(fused):
                self._num_failed[fused.asked] += 1
            for name, source in fused.sources.items():
                self._forget_wanted(source)
                if source.is_open:
                    self._close_source(name, source)

    def step(self) -> list[Drafted]:
        """Make the shadow drafts; they are no answers."""
        for fused in self._open.values():
            for name, source in fused.sources.items():
                if source.num_wanted:
                    self._draft_shadow(name, source)
        return []

    def check_integrity(self) -> None:
        """The sources account for what they hold."""

    def _request_first(self, fused: _Fused, sequence: DraftSequence, num_tokens: int) -> None:
        """Ask the first source, always: a choice by speed would make the tokens depend on the clock."""
        source = next(iter(fused.sources.values()))
        source.sequence.takes_trees = sequence.takes_trees
        self._opened(source).request(source.sequence, num_tokens)

    def _choose(self, fused: _Fused) -> str:
        """The fastest source, or one to be timed: for two rounds if the first is not."""
        fused.num_rounds += 1
        if fused.is_trial and fused.is_fresh:
            fused.is_trial = False
            return fused.asked
        tried = self._untimed(fused)
        if tried is None:
            speeds = self._speeds(fused)
            fastest = max(speeds, key=lambda name: speeds[name])
            tried = self._due(fused, speeds, fastest)
        fused.is_trial = tried is not None
        return tried or fastest

    def _untimed(self, fused: _Fused) -> str | None:
        """A source whose rounds of its present confidence were never timed. A source that always raises would stay one
        for ever."""
        sources = ((name, source) for name, source in fused.sources.items() if not self._is_broken(name))
        untimed = (name for name, source in sources if not self._round_ns[name].knows(self._confidence(source)))
        return next(untimed, None)

    def _is_broken(self, name: str) -> bool:
        return self._num_failed[name] >= _MAX_FAILED

    def _due(self, fused: _Fused, speeds: Mapping[str, float], fastest: str) -> str | None:
        """A source that is to be tried again."""
        most = max(speeds[fastest], _NO_SPEED)
        fused.sources[fastest].last_round = fused.num_rounds
        for name, source in fused.sources.items():
            kind = (name, self._confidence(source))
            self._num_passed[kind] += 1
            if isinstance(source.drafter, ImmediateDrafter):  # its tokens are known, its time may be of another day
                is_due = self._num_passed[kind] >= _LONGEST_PAUSE
            else:  # all sequences may be too short for a trial of their own
                is_due = fused.num_rounds - source.last_round >= self._pause(speeds[name] / most)
                is_due |= self._num_passed[kind] >= _LONGEST_COMMON_PAUSE
            if is_due:
                source.last_round = fused.num_rounds
                self._num_passed[kind] = 0
                return name
        return None

    def _speeds(self, fused: _Fused) -> dict[str, float]:
        """Expected tokens per nanosecond; 0 of a source that was never timed or is broken."""
        speeds = {}
        for name, source in fused.sources.items():
            confidence = self._confidence(source)
            mean_ns = self._round_ns[name].mean(confidence)
            if not source.is_open:
                mean_ns += max(0.0, self._first_ns[name].mean - mean_ns) / _ROUNDS_AFTER_FIRST
            is_known = mean_ns > 0 and not self._is_broken(name)
            speeds[name] = source.tokens.mean(confidence) / mean_ns if is_known else 0.0
        return speeds

    def _confidence(self, source: _Source) -> int:
        """0 where a source has none, or does not follow the sequence yet."""
        if not source.is_open or not isinstance(source.drafter, ImmediateDrafter):
            return 0
        try:
            return int(source.drafter.confidence(source.sequence))  # each fraction would be a kind of its own
        except Exception:  # a fault costs no more than a worse choice
            logger.exception("a drafter's confidence failed")
            return 0

    def _pause(self, speed: float) -> float:
        """Rounds after which a source is tried again: its trials cost no more than its part of `_TRIAL_SHARE`.

        `speed`: its rate over the fastest source's.
        """
        share = _TRIAL_SHARE / max(1, len(self._sources) - 1)
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _TRIAL_ROUNDS * (1.0 - speed) / share))

    def _learn(self, fused: _Fused, num_tokens: int) -> None:
        name, source = fused.asked, fused.sources[fused.asked]
        self._num_failed[name] = 0
        elapsed_ns = self._round_so_far_ns(fused)
        # A restarting verify worker, a client that does not read, or plain steps while drafts do not pay can make a
        # round a thousand times as long. That says nothing about the source, and a mean would never forget it.
        round_ns = min(elapsed_ns, self._longest_ns(fused) or elapsed_ns)
        num_brought = min(num_tokens, fused.num_asked + 1)  # the others were decided while its draft was late
        if round_ns == elapsed_ns:
            self._count(name, source, fused.asked_confidence, num_brought)
        if not fused.is_fresh:
            self._round_ns[name].add(fused.asked_confidence, round_ns)
            self._num_passed[name, fused.asked_confidence] = 0
        elif not source.last_length:
            self._first_ns[name].add(round_ns)
        source.last_length = len(source.sequence.ids) - (num_tokens - num_brought)

    def _round_so_far_ns(self, fused: _Fused) -> int:
        return max(1, self._clock_ns() - fused.asked_ns)

    def _longest_ns(self, fused: _Fused) -> float:
        """Expected duration of a round like the one under way; 0 while none was timed."""
        name = fused.asked
        usual_ns = self._first_ns[name].mean if fused.is_fresh else self._round_ns[name].mean(fused.asked_confidence)
        return _MOST_TIMES_USUAL * usual_ns

    def _count(self, name: str, source: _Source, confidence: int, num_tokens: int) -> None:
        source.tokens.add(confidence, num_tokens)
        self._tokens[name].add(confidence, num_tokens)

    def _open_early(self, name: str, source: _Source) -> None:
        try:
            self._opened(source)
        except Exception:  # it will be tried again when it is to draft
            logger.exception("drafter %s failed", name)

    def _commit_source(self, name: str, source: _Source, ids: list[int]) -> None:
        """One that fails is taken in afresh when it is to draft; the others keep what they have."""
        try:
            source.drafter.commit(source.sequence, ids)
        except Exception:
            logger.exception("drafter %s failed", name)
            self._close_source(name, source)
            source.is_open = False

    @staticmethod
    def _close_source(name: str, source: _Source) -> None:
        try:
            source.drafter.close(source.sequence)
        except Exception:  # the others still have to free what they hold
            logger.exception("drafter %s failed", name)

    @staticmethod
    def _most_tokens(source: _Source, num_tokens: int) -> int:
        """Most tokens of its draft: a drafter that answers at once may go by the terms instead of the number asked."""
        terms = source.sequence.terms
        return terms.max_tokens if terms is not None and isinstance(source.drafter, ImmediateDrafter) else num_tokens

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
        if drafted.draft_ids or source.sequence.terms is None:  # steps without a draft would follow an empty one
            source.shadow, source.shadow_confidence = ShadowDraft(drafted), self._confidence(source)

    def _forget_wanted(self, source: _Source) -> None:
        self._num_wanted -= source.num_wanted > 0
        source.num_wanted = 0

    def _follow(self, name: str, source: _Source, ids: list[int]) -> None:
        """Learn from a shadow draft that has ended; one that was not made in time is dropped."""
        self._forget_wanted(source)
        if source.shadow is not None and (num_tokens := source.shadow.follow(ids)) is not None:
            self._count(name, source, source.shadow_confidence, num_tokens)
            source.shadow = None
