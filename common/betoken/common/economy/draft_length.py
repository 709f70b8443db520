"""Draft lengths by price: positions are admitted across the sequences of a batch while expected tokens per second grow.

A round of n sequences brings each the target's own token and its accepted draft tokens. A position is accepted with its
survival probability: that its token and all before it are. Of all positions, most likely first, those are drafted that
give the highest rate (n + E[accepted]) / T; none of them is decoding without speculation. Source: the goodput of Liu et
al., arXiv:2406.14066, maximised over the positions of all sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from betoken.common.economy.means import DecayedMean
from betoken.common.economy.speedup import RoundCosts, overlapped_round_time

LADDER = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Draft lengths; a sequence moves by one step at a time."""
_COOL_DOWN = 1
"""Rounds of a length before the next change."""
_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT = 0.7, 4.0
"""Acceptance of a token of a new drafter, and its weight in observed tokens."""
_DECAY, _SEQUENCE_DECAY = 0.995, 0.95
"""Weight of the past per observed token, of all sequences and of one."""
_SEQUENCE_WEIGHT = 8.0
"""Weight of the mean acceptance of all sequences for a new one, in tokens."""
_RECONSIDERED_AFTER = 32
"""Tokens without a draft after which a sequence that had length 0 drafts again."""
_RELAX_TOKENS = 2000
"""Tokens of sequences with length 0 in which the evidence moves to the prior, to 1 / e of its distance. Answers shorter
than the pause above would otherwise never draft again."""


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Time of a round of a batch, seconds."""

    decode_s: float
    """A step of all sequences without drafts."""
    token_s: float
    """Added by each draft token to the forward."""
    draft_s: float
    """A draft token of all sequences; the drafter drafts them in one batch."""
    request_s: float = 0.0
    """Requesting a draft, drafting excluded."""
    hit_rate: float = 0.0
    """Share of drafts made ahead, during the verification before; 0 = rounds are not overlapped."""
    num_sequences: int = 1
    """Running sequences; without a draft, a sequence gets a token of each round."""

    def seconds(self, num_tokens: int, longest: int) -> float:
        """Return the time with so many draft tokens in all, and so many of the sequence with most."""
        verify_s = self.decode_s + num_tokens * self.token_s
        if not longest:
            return verify_s
        if not self.hit_rate:
            return verify_s + longest * self.draft_s + self.request_s
        costs = RoundCosts(self.draft_s, verify_s, draft_hop=self.request_s)
        return overlapped_round_time(longest, costs, self.hit_rate)


def draft_lengths(survivals: Sequence[Sequence[float]], time: RoundTime) -> list[int]:
    """Return the draft length of each sequence, from the survival probability of each of its positions."""
    positions = [
        (-probability, depth, index)
        for index, survival in enumerate(survivals)
        for depth, probability in enumerate(survival, start=1)
    ]
    positions.sort()
    num_tokens, longest = float(max(len(survivals), time.num_sequences)), 0
    best, best_rate = 0, num_tokens / time.seconds(0, 0)
    for count, (negative, depth, _) in enumerate(positions, start=1):
        num_tokens -= negative
        longest = max(longest, depth)
        rate = num_tokens / time.seconds(count, longest)
        if rate > best_rate:
            best, best_rate = count, rate
    lengths = [0] * len(survivals)
    for _, depth, index in positions[:best]:
        lengths[index] = max(lengths[index], depth)
    return lengths


class PositionAcceptance:
    """Conditional acceptance by position in a draft, from realised accepts of all sequences of a drafter."""

    def __init__(self) -> None:
        self._all = DecayedMean(_DECAY, _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE, _PRIOR_WEIGHT)
        self._positions: list[DecayedMean] = []

    @property
    def mean(self) -> float:
        """Acceptance of a token whose predecessors were accepted."""
        return self._all.mean

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add the result of a chain: its accepted tokens, and the first rejected one if there is one."""
        for position in range(min(num_draft_tokens, num_accepted + 1)):
            while len(self._positions) <= position:
                self._positions.append(DecayedMean(_DECAY, _PRIOR_WEIGHT * self.mean, _PRIOR_WEIGHT))
            self._positions[position].add(position < num_accepted)
            self._all.add(position < num_accepted)

    def relax(self, share: float) -> None:
        """Move the evidence toward the prior by `share`, while no drafts are made."""
        for mean in (self._all, *self._positions):
            mean.total += share * (_PRIOR_WEIGHT * _PRIOR_ACCEPTANCE - mean.total)
            mean.num += share * (_PRIOR_WEIGHT - mean.num)

    def survival(self, num_tokens: int, acceptance: float | None = None) -> list[float]:
        """Return the survival probability of each position; `acceptance`: mean of one sequence, if that differs."""
        scale = 1.0 if acceptance is None else acceptance / max(1e-6, self.mean)
        survival, probability = [], 1.0
        for position in range(num_tokens):
            known = self._positions[position].mean if position < len(self._positions) else self.mean
            probability *= min(0.99, known * scale)
            survival.append(probability)
        return survival


class SequenceDraftLength:
    """Draft length of one sequence, as `DraftLengths` decides it."""

    def __init__(self, lengths: DraftLengths) -> None:
        self._lengths = lengths
        self._own = DecayedMean(_SEQUENCE_DECAY)
        self._rung: int | None = None
        self._num_rounds = 0
        """Rounds of the current length."""
        self._num_tokens = 0
        """Tokens since the sequence had length 0."""
        self.target = 0
        """Length that is best at present."""

    @property
    def acceptance(self) -> float:
        """Acceptance of its tokens, with the mean of all sequences as prior."""
        weight = _SEQUENCE_WEIGHT
        return (self._own.total + weight * self._lengths.acceptance.mean) / (self._own.num + weight)

    @property
    def is_paused(self) -> bool:
        """Whether it has length 0 for now."""
        return self._rung == 0 and self._num_tokens < _RECONSIDERED_AFTER

    def next(self, time: RoundTime, num_tokens: int, *, can_pause: bool = True) -> int:
        """Return the length of the next draft, at most `num_tokens`; 0 pauses the sequence if that is allowed."""
        self._lengths.decide(self, time)
        wanted = max(self.target, 0 if can_pause else 1)
        target = max(index for index, length in enumerate(LADDER) if length <= wanted)
        if self._rung is None or (self._rung == 0 and target):
            self._rung, self._num_rounds = target, 0
        elif self._num_rounds >= _COOL_DOWN and target != self._rung:
            self._rung += 1 if target > self._rung else -1
            self._num_rounds = 0
        self._num_rounds += 1
        if self._rung == 0 and self._num_tokens >= _RECONSIDERED_AFTER:
            self._num_tokens = 0
            return min(1, num_tokens)
        return min(LADDER[self._rung], num_tokens)

    def pause(self) -> None:
        """Set length 0 for now."""
        self._rung, self._num_rounds, self._num_tokens = 0, 0, 0

    def add_tokens(self, num_tokens: int) -> None:
        """Add committed tokens."""
        if self._rung == 0:
            self._num_tokens += num_tokens
            self._lengths.acceptance.relax(num_tokens / _RELAX_TOKENS)
        else:
            self._num_tokens = 0

    def add(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Add the result of a chain."""
        self._lengths.acceptance.add(num_draft_tokens, num_accepted)
        for position in range(min(num_draft_tokens, num_accepted + 1)):
            self._own.add(position < num_accepted)

    def close(self) -> None:
        """Leave the batch."""
        self._lengths.close(self)


class DraftLengths:
    """Draft lengths of all running sequences of a drafter, decided together."""

    def __init__(self, max_tokens: int = LADDER[-1]) -> None:
        self.acceptance = PositionAcceptance()
        self._max_tokens = max_tokens
        self._sequences: list[SequenceDraftLength] = []
        self._num_left = 0
        """Decisions until the lengths are computed again: one for each sequence."""

    def open(self) -> SequenceDraftLength:
        """Return the length of a new sequence."""
        sequence = SequenceDraftLength(self)
        self._sequences.append(sequence)
        self._num_left = 0
        return sequence

    def close(self, sequence: SequenceDraftLength) -> None:
        """Remove a sequence; idempotent."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def decide(self, sequence: SequenceDraftLength, time: RoundTime) -> None:
        """Set the target of every sequence, once per round of the batch."""
        if self._num_left and sequence in self._sequences:
            self._num_left -= 1
            return
        batch = self._sequences or [sequence]
        survivals = [self.acceptance.survival(self._max_tokens, one.acceptance) for one in batch]
        for one, length in zip(batch, draft_lengths(survivals, time), strict=True):
            one.target = length
        self._num_left = len(batch) - 1

    def best(self, num_sequences: int, time: RoundTime) -> tuple[int, float]:
        """Return the best length of at least 1 for equal sequences, and its expected tokens per round and sequence."""
        survival = self.acceptance.survival(self._max_tokens)
        best, most, tokens, best_rate = 1, 1.0, 1.0, 0.0
        for length, probability in enumerate(survival, start=1):
            tokens += probability
            rate = tokens / time.seconds(num_sequences * length, length)
            if rate > best_rate:
                best, most, best_rate = length, tokens, rate
        return best, most
