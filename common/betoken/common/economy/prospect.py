"""The expected gain of drafting before it is tried: from its rounds so far and the price of a row right now.

Knows numbers of one drafter, whatever sequences they came from; knows no crowd and no clock.
"""

import math
from collections import defaultdict

from betoken.common.economy.means import DecayedMean

_DECAY = 0.99
"""Weight of the past, per step."""
_PRIOR_TOKENS, _PRIOR_ROWS = 3.0, 6.0
"""Tokens and rows of a step of a drafter that has not drafted yet."""
_PRIOR_STEPS = 16.0
"""Weight of the prior assumption, in steps."""


class Prospect:
    """Tokens, rows and waiting of the steps that went by drafts, the plain ones after an empty draft included.

    Waiting is kept by the size of the crowd: among many it is mostly for each other, which a lone sequence never does.
    """

    def __init__(self) -> None:
        self._tokens = DecayedMean(_DECAY, _PRIOR_STEPS * _PRIOR_TOKENS, _PRIOR_STEPS)
        self._rows = DecayedMean(_DECAY, _PRIOR_STEPS * _PRIOR_ROWS, _PRIOR_STEPS)
        self._waiting_s: defaultdict[int, DecayedMean] = defaultdict(lambda: DecayedMean(_DECAY, 0.0, _PRIOR_STEPS))

    def add(self, num_tokens: int, num_rows: int, waiting_s: float, size: int) -> None:
        """A step brought tokens for so many rows, after so long a wait for its draft, seconds; `size`: of the crowd."""
        self._tokens.add(num_tokens)
        self._rows.add(num_rows)
        self._waiting_s[size].add(waiting_s)

    def gain(self, num_running: int, plain_step_s: float, row_s: float, size: int) -> float:
        """log(speed with drafts / speed without) as expected.

        Args:
            num_running: sequences at work.
            plain_step_s: time of a token of each sequence without drafts, seconds.
            row_s: time that a row adds to a forward, seconds.
            size: of the crowd.
        """
        drafted_s = plain_step_s + num_running * (self._rows.mean - 1.0) * row_s + self._waiting_s[size].mean
        return math.log(max(1.0, self._tokens.mean) * plain_step_s / drafted_s)
