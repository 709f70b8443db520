"""The expected gain of drafting before it is tried, from its rounds so far and the costs of a round right now.

Knows numbers of one drafter, whatever sequences they came from; knows no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from betoken.common.economy.draft_length import DraftLengths, RoundTime
from betoken.common.economy.means import DecayedMean

_DECAY = 0.99
"""Weight of the past, per step."""
_WAITING_DECAY = 0.95
"""Weight of the past, per wait."""
_PRIOR_TOKENS, _PRIOR_ROWS = 3.0, 5.0
"""Tokens of a step of a drafter that has not drafted yet, and tokens of its forward."""
_PRIOR_STEPS = 16.0
"""Weight of the prior, in steps."""
_MOST_TIMES_USUAL = 2.0
"""Longest wait that is learned, over the mean: the first one in a sequence includes prefill."""
_LENGTH_VARIANCE = 0.3
"""Variance of draft lengths at which drafts have the weight of the time per token."""
_ONE_SOURCE = 0.9
"""Share of drafts of forwards above which no other source drafts."""
_PRIOR_DRAFT_SHARE = 0.25
"""Time per draft token of a new drafter over the decode step of one sequence."""


@dataclass(slots=True)
class _Waiting:
    """Waiting at one load level, seconds. Among many it is mostly for each other, which a lone sequence never does."""

    request_s: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Wait for a draft beyond its drafting."""
    length: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Draft tokens of forwards."""
    squares: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Their squares."""
    drafting_s: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Drafting of a draft of forwards."""
    products: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Drafting times draft tokens."""
    step_s: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Wait of a step, 0 of one without a draft."""
    further_tokens: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Draft tokens after the first of drafts of forwards."""
    further_forwards: DecayedMean = field(default_factory=lambda: DecayedMean(_WAITING_DECAY))
    """Their forwards after the first: none if one forward drafts all tokens."""

    def add_drafting(self, num_tokens: int, num_forwards: int, seconds: float) -> None:
        """Add the drafting of a draft of forwards."""
        if self.length.num:
            fixed_s, token_s = self.draft_times()
            seconds = min(seconds, _MOST_TIMES_USUAL * (fixed_s + num_tokens * token_s) or seconds)
        self.further_tokens.add(num_tokens - 1)
        self.further_forwards.add(min(num_forwards, num_tokens) - 1)
        values = (num_tokens, num_tokens**2, seconds, seconds * num_tokens)
        for mean, value in zip((self.length, self.squares, self.drafting_s, self.products), values, strict=True):
            mean.add(value)

    def draft_times(self) -> tuple[float, float]:
        """Return the fixed time of a draft and the time per token, by ridge regression.

        The regression is drawn to a line through the mean draft. Its slope is the time of a forward if each further
        token takes a forward, and 0 if one forward drafts all tokens.
        """
        length, seconds = self.length.mean, self.drafting_s.mean
        share = self.further_forwards.total / self.further_tokens.total if self.further_tokens.total else 1.0
        token_s = share * seconds / length
        variance = self.squares.mean - length * length
        covariance = self.products.mean - length * seconds
        slope = (covariance + _LENGTH_VARIANCE * token_s) / (variance + _LENGTH_VARIANCE)
        token_s = min(seconds / length, max(0.0, slope))
        return seconds - length * token_s, token_s


class ExpectedGain:
    """Costs and yields of drafted steps, decode steps after an empty draft included."""

    def __init__(self) -> None:
        self.lengths = DraftLengths()
        self._tokens = DecayedMean(_DECAY, _PRIOR_STEPS * _PRIOR_TOKENS, _PRIOR_STEPS)
        self._rows = DecayedMean(_DECAY, _PRIOR_STEPS * _PRIOR_ROWS, _PRIOR_STEPS)
        self._by_length = DecayedMean(_DECAY)
        """Share of drafts made by forwards, whose length `lengths` decides."""
        self._hits = DecayedMean(_WAITING_DECAY)
        """Share of drafts of forwards that were made ahead."""
        self._waiting: dict[int, _Waiting] = {}

    def add(self, num_tokens: int, num_rows: int, waiting_s: float, level: int) -> None:
        """Add a step: its tokens, the tokens of its forward, and the wait for its draft."""
        self._tokens.add(num_tokens)
        self._rows.add(num_rows)
        step_s = self._waiting.setdefault(level, _Waiting()).step_s
        step_s.add(min(waiting_s, _MOST_TIMES_USUAL * step_s.mean) if step_s.mean else waiting_s)

    def add_draft(
        self,
        num_tokens: int,
        num_forwards: int,
        waited_s: float,
        drafting_s: float,
        level: int,
        *,
        is_hit: bool = False,
    ) -> None:
        """Add the times of a draft. `is_hit`: it was made ahead; its times do not include drafting."""
        if num_tokens and (num_forwards or is_hit):
            self._hits.add(is_hit)
        if is_hit:
            self._by_length.add(True)
            return
        waiting = self._waiting.setdefault(level, _Waiting())
        waiting.request_s.add(max(0.0, waited_s - drafting_s))
        if num_tokens:
            self._by_length.add(num_forwards > 0)
        if num_tokens and num_forwards:
            waiting.add_drafting(num_tokens, num_forwards, drafting_s)

    @property
    def can_pause(self) -> bool:
        """Whether a sequence whose drafts do not pay may pause: no other source drafts for it."""
        return self._by_length.mean > _ONE_SOURCE

    def relax(self, share: float) -> None:
        """Move the evidence toward the prior by `share`, while no drafts are made."""
        self.lengths.acceptance.relax(share)
        for mean, prior in ((self._tokens, _PRIOR_TOKENS), (self._rows, _PRIOR_ROWS)):
            mean.total += share * (_PRIOR_STEPS * prior - mean.total)
            mean.num += share * (_PRIOR_STEPS - mean.num)

    def round_time(self, decode_s: float, token_s: float, level: int) -> RoundTime:
        """Return the costs of a round at a load level."""
        request_s = self._mean("request_s", level) or 0.0
        known = [(abs(other - level), waiting) for other, waiting in self._waiting.items() if waiting.length.num]
        if known:
            fixed_s, draft_s = min(known, key=lambda pair: pair[0])[1].draft_times()
            return RoundTime(decode_s, token_s, draft_s, request_s + fixed_s, self._hits.mean)
        is_new = self._mean("step_s", level) is None
        return RoundTime(decode_s, token_s, is_new * _PRIOR_DRAFT_SHARE * decode_s / (1 << level), request_s)

    def gain(self, num_running: int, decode_s: float, token_s: float, level: int) -> float:
        """Return log(speed with drafts / speed without) as expected.

        Args:
            num_running: running sequences.
            decode_s: time of a token of each sequence without drafts, seconds.
            token_s: time that a draft token adds to a forward, seconds.
            level: of the load.
        """
        tokens, rows, waiting_s = self._round(num_running, decode_s, token_s, level)
        return math.log(tokens * decode_s / (decode_s + num_running * rows * token_s + waiting_s))

    def trial_loss(self, num_running: int, decode_s: float, token_s: float, level: int) -> float:
        """Return the batch's loss in tokens per token of one sequence that drafts while the others decode; negative for
        a gain. Draft tokens and the wait for a draft delay every sequence. Arguments as in `gain`."""
        tokens, rows, waiting_s = self._round(1, decode_s, token_s, level)
        return (num_running * (rows * token_s + waiting_s) / decode_s - (tokens - 1.0)) / tokens

    def _round(self, num_drafting: int, decode_s: float, token_s: float, level: int) -> tuple[float, float, float]:
        """Expected tokens, draft tokens and waiting seconds of a round in which so many sequences draft."""
        time = self.round_time(decode_s, token_s, level)
        tokens, rows, waiting_s = self._tokens.mean, self._rows.mean - 1.0, self._mean("step_s", level)
        length, most = self.lengths.best(num_drafting, time)
        share = self._by_length.mean if self._by_length.num else 0.5
        num_draft_tokens = num_drafting * length
        drafting_s = time.seconds(num_draft_tokens, length) - decode_s - num_draft_tokens * token_s
        waiting_s = length * time.draft_s if waiting_s is None else waiting_s
        tokens += share * (most - tokens)
        rows += share * (length - rows)
        waiting_s += share * (drafting_s - waiting_s)
        return max(1.0, tokens), rows, waiting_s

    def _mean(self, name: str, level: int) -> float | None:
        """The mean at the nearest level that has one; None without any."""
        known = [(abs(other - level), getattr(waiting, name)) for other, waiting in self._waiting.items()]
        found = min(((distance, mean) for distance, mean in known if mean.num), key=lambda pair: pair[0], default=None)
        return None if found is None else found[1].mean
