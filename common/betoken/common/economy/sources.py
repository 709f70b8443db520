"""Which of several sources drafts a sequence's next round: the source with the highest expected tokens per second.

Tokens per round are per sequence, time per round is shared by all sequences. A round lasts from its request to the
commit that ends it. It includes drafting, verifying and the steps without a draft that may follow an empty one.
Knows names, confidences, lengths and times; knows no drafter and no clock.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from betoken.common.economy.means import DecayedMean, RoundMeans

_DECAY = 0.95
"""Weight of the past, per round of a source in a sequence."""
_COMMON_DECAY = 0.98
"""Decay per round over all sequences."""
_PRIOR_ROUNDS = 8.0
"""Weight of other sequences' experience, in rounds of a new sequence."""
_TRIAL_SHARE = 0.03
"""Part of the time that trying other sources may cost, all together."""
_TRIAL_ROUNDS = 2
"""Maximum number of rounds of a trial; if the first is not timed, the second is."""
_ROUNDS_AFTER_FIRST = 5
"""Rounds that bear the prompt's prefill, which a source's first round in a sequence includes."""
_MANY_MISSED = 32
"""Tokens whose prefill would make a round look slower than the source's rounds are."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 200
"""Rounds from one trial of a source to the next."""
_LONGEST_COMMON_PAUSE = 1000
"""Rounds between trials over all sequences, for sources that have to prefill the prompt."""
_MOST_TIMES_USUAL = 8
"""Maximum round length that is learned, relative to the mean of its kind."""

_MAX_FAILED = 16
"""Failed rounds of a source in a row before it counts as broken."""
_NO_SPEED = 1e-30
"""Stands for the fastest rate while no source was timed."""


@dataclass(slots=True)
class _Source:
    """The shared knowledge of all sequences about a source."""

    is_immediate: bool
    """Whether it answers at once: its confidence counts, and what it would have brought is learnt unasked."""
    tokens: RoundMeans = field(default_factory=lambda: RoundMeans(_COMMON_DECAY))
    """Tokens per round."""
    round_ns: RoundMeans = field(default_factory=lambda: RoundMeans(_COMMON_DECAY))
    """Time per round, ns."""
    first_ns: DecayedMean = field(default_factory=lambda: DecayedMean(_COMMON_DECAY))
    """Time of a source's first round in a sequence, ns."""
    num_passed: Counter[int] = field(default_factory=Counter)
    """Rounds since it was last tried, or timed, by the confidence it had in them."""
    num_failed: int = 0
    """Failed rounds in a row."""

    @property
    def is_broken(self) -> bool:
        return self.num_failed >= _MAX_FAILED


@dataclass(slots=True)
class _View:
    """A source as one sequence sees it."""

    tokens: RoundMeans
    last_length: int = 0
    """Length of the sequence after its last round, tokens; 0 before the first."""
    last_round: int = 0
    """When it was the fastest or was tried."""


@dataclass(slots=True)
class _Round:
    """The round under way."""

    name: str
    started_ns: int
    num_tokens: int
    """Draft tokens at most."""
    confidence: int
    is_fresh: bool
    """Whether the source has not drafted here for long. Such a round is not timed: it includes the prefill of the
    prompt, or of what was committed while others drafted."""


class Sources:
    """Sources by name, and what all sequences know of them."""

    def __init__(self, names: Collection[str], immediate: Collection[str]) -> None:
        """`immediate`: the sources that answer at once."""
        self._sources = {name: _Source(name in immediate) for name in names}

    def of_sequence(self) -> "SequenceSources":
        """These sources for a new sequence."""
        return SequenceSources(self._sources)

    def fail(self, name: str) -> None:
        """A round of that source failed; its next completed round clears the failure."""
        self._sources[name].num_failed += 1


class SequenceSources:
    """The choice of one sequence, round by round: `choose`, `begin`, and `end` or `give_up`."""

    def __init__(self, sources: Mapping[str, _Source]) -> None:
        self._sources = sources
        self._views = {
            name: _View(RoundMeans(_DECAY, source.tokens, _PRIOR_ROUNDS)) for name, source in sources.items()
        }
        self._num_rounds = 0
        self._round: _Round | None = None
        self._tried = ""
        """Source whose trial goes on, as its first round was not timed; empty = none."""

    @property
    def asked(self) -> str | None:
        """Who drafts in the round under way."""
        return self._round.name if self._round is not None else None

    def choose(self, confidences: Mapping[str, int | None]) -> str:
        """The fastest source, or one to be timed: for two rounds if the first is not.

        `confidences`: of every source in its draft, 0 if it has none. None: it does not hold the sequence, and its
        round includes the prefill of the prompt.
        """
        self._num_rounds += 1
        if self._tried:
            tried, self._tried = self._tried, ""
            return tried
        if untimed := self._untimed(confidences):
            self._tried = untimed
            return untimed
        speeds = {name: self._speed(name, confidences[name]) for name in self._sources}
        fastest = max(speeds, key=lambda name: speeds[name])
        self._tried = self._due(speeds, fastest, confidences)
        return self._tried or fastest

    def begin(self, name: str, now_ns: int, num_tokens: int, confidence: int | None, length: int) -> None:
        """A round of that source begins.

        Args:
            num_tokens: draft tokens at most.
            confidence: as `choose` heard of it.
            length: of the sequence, tokens.
        """
        is_fresh = confidence is None or length - self._views[name].last_length > _MANY_MISSED
        if not is_fresh:
            self._tried = ""
        self._round = _Round(name, now_ns, num_tokens, confidence or 0, is_fresh)

    def end(self, now_ns: int, num_ids: int, length: int) -> None:
        """The round under way brought so many ids; the sequence has that length now."""
        if self._round is None:
            return
        ended, self._round = self._round, None
        source, view = self._sources[ended.name], self._views[ended.name]
        source.num_failed = 0
        elapsed_ns = max(1, now_ns - ended.started_ns)
        # A verify worker that starts again, a client that does not read, plain steps while no drafts pay: what makes
        # a round a thousand times as long is not caused by its source, and would dominate the mean.
        round_ns = min(elapsed_ns, self._longest_ns(ended) or elapsed_ns)
        num_brought = min(num_ids, ended.num_tokens + 1)  # the others were decided while its draft was late
        if round_ns == elapsed_ns:
            self.count(ended.name, ended.confidence, num_brought)
        if not ended.is_fresh:
            source.round_ns.add(ended.confidence, round_ns)
            source.num_passed[ended.confidence] = 0
        elif not view.last_length:
            source.first_ns.add(round_ns)
        view.last_length = length - (num_ids - num_brought)

    def count(self, name: str, confidence: int, num_tokens: int) -> None:
        """A draft of that source brought so many tokens, or would have."""
        self._views[name].tokens.add(confidence, num_tokens)
        self._sources[name].tokens.add(confidence, num_tokens)

    def give_up(self, now_ns: int) -> None:
        """The current round ends without its draft; if it lasted longer than its kind, it is a failure."""
        if self._round is not None and max(1, now_ns - self._round.started_ns) > self._longest_ns(self._round):
            self._sources[self._round.name].num_failed += 1

    def _untimed(self, confidences: Mapping[str, int | None]) -> str:
        """A source whose rounds at its current confidence were never timed; empty = none. A source that always raises
        would remain one."""
        for name, source in self._sources.items():
            if not source.is_broken and not source.round_ns.knows(confidences[name] or 0):
                return name
        return ""

    def _due(self, speeds: Mapping[str, float], fastest: str, confidences: Mapping[str, int | None]) -> str:
        """A source that is to be tried again; empty = none."""
        most = max(speeds[fastest], _NO_SPEED)
        self._views[fastest].last_round = self._num_rounds
        for name, source in self._sources.items():
            confidence, view = confidences[name] or 0, self._views[name]
            source.num_passed[confidence] += 1
            if source.is_immediate:  # its tokens are known, its time may be of another day
                is_due = source.num_passed[confidence] >= _LONGEST_PAUSE
            else:  # every sequence may be too short for its own trial
                is_due = self._num_rounds - view.last_round >= self._pause(speeds[name] / most)
                is_due |= source.num_passed[confidence] >= _LONGEST_COMMON_PAUSE
            if is_due:
                view.last_round = self._num_rounds
                source.num_passed[confidence] = 0
                return name
        return ""

    def _speed(self, name: str, confidence: int | None) -> float:
        """Expected tokens per nanosecond; 0 of a source that was never timed or is broken."""
        source = self._sources[name]
        mean_ns = source.round_ns.mean(confidence or 0)
        if confidence is None:
            mean_ns += max(0.0, source.first_ns.mean - mean_ns) / _ROUNDS_AFTER_FIRST
        is_known = mean_ns > 0 and not source.is_broken
        return self._views[name].tokens.mean(confidence or 0) / mean_ns if is_known else 0.0

    def _pause(self, speed: float) -> float:
        """Rounds after which a source is tried again: its trials cost no more than its part of `_TRIAL_SHARE`.

        `speed`: its rate over the fastest source's.
        """
        share = _TRIAL_SHARE / max(1, len(self._sources) - 1)
        return min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, _TRIAL_ROUNDS * (1.0 - speed) / share))

    def _longest_ns(self, round_: _Round) -> float:
        """Expected length of a round like this one; 0 while none was timed."""
        source = self._sources[round_.name]
        usual_ns = source.first_ns.mean if round_.is_fresh else source.round_ns.mean(round_.confidence)
        return _MOST_TIMES_USUAL * usual_ns
