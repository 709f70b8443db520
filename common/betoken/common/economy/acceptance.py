"""How often the tokens that a drafter calls likely, by their share of what it knows, are really accepted.

Knows shares and what was committed, nothing of models or n-grams.
"""

import math
from collections.abc import Sequence

_RATE = 0.02
"""Weight of one observation."""
_LEAST, _MOST = 0.1, 10.0
"""Exponents a drafter may be wrong by."""


class Calibration:
    """Corrects a drafter's shares by one exponent, so that as many tokens are accepted as it says.

    An exponent keeps the order of drafts, and corrects a path by the same rule as its tokens.
    """

    def __init__(self) -> None:
        self.exponent = 1.0

    def score(self, share: float) -> float:
        """How likely a token, or a path of them, is accepted."""
        return math.pow(share, self.exponent)

    def share(self, score: float) -> float:
        """The share of that score."""
        return math.pow(score, 1.0 / self.exponent)

    def learn(
        self, draft_ids: Sequence[int], parents: Sequence[int], shares: Sequence[float], ids: Sequence[int]
    ) -> None:
        """Follow the committed `ids` along a draft: each token whose predecessors were accepted was itself accepted or
        refused.

        `shares`: of the paths that end in each token.
        """
        node, depth, share = -1, 0, 1.0
        for index, draft_id in enumerate(draft_ids):
            if parents[index] != node or depth >= len(ids) or share <= 0.0:
                continue
            is_accepted = draft_id == ids[depth]
            self.observe(shares[index] / share, is_accepted)
            if is_accepted:
                node, depth, share = index, depth + 1, shares[index]

    def observe(self, share: float, is_accepted: bool) -> None:
        """A token of that share, whose predecessors were accepted, was itself accepted or refused."""
        exponent = self.exponent * (1.0 + _RATE * (self.score(share) - is_accepted))
        self.exponent = min(_MOST, max(_LEAST, exponent))
