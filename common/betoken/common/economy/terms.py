"""Cost of a draft and the yield it has to reach, in tokens emitted meanwhile; trials of that; and the pause after an
empty draft.

Knows nothing of sequences or drafters.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

USUAL_DRAFT_TOKENS = 5
"""Draft tokens requested from drafters without confidences."""
MAX_DRAFT_TOKENS = 16
"""Maximum number of draft tokens until a worker has reported its limit."""

_FIRST_PAUSE, _LONGEST_PAUSE = 2, 8
"""Plain steps after an empty draft; twice as many after each further one."""
_TOKENS_PER_TRIAL = 100
"""Tokens without a draft for each draft token of a trial."""
_ASKING_SHARE = 0.05
"""Weight of the last draft in the mean time of asking."""
_SAVED_SHARE = 0.75
"""Part of the cost of asking that an empty draft saves, with four steps or so until the next asking."""


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """Cost of a draft, and the yield it has to reach, in tokens that would be emitted meanwhile."""

    max_tokens: int
    """Most tokens wanted."""
    row_price: float = 0.0
    """Price of verifying one draft token; a token pays if it is likelier than that to be accepted."""
    min_gain: float = 0.0
    """Least gain of a draft: what its tokens are expected to bring beyond their price."""

    def is_worth(self, scores: Sequence[float]) -> bool:
        """Whether tokens that are as likely as `scores` to be accepted bring enough."""
        return bool(scores) and sum(scores) - len(scores) * self.row_price >= self.min_gain


def terms_at(
    tokens_per_s: float, num_running: int, row_price: float, max_tokens: int, asking_s: float
) -> DraftTerms | None:
    """Terms under the load of a verify worker; None while its speed is unknown, or speed or price is out of range.

    A token of a forward delays all sequences, waiting only one.

    Args:
        tokens_per_s: emitted by the worker, all sequences together.
        num_running: sequences that emit them.
        row_price: tokens emitted in the time that one more row takes.
        max_tokens: most draft tokens.
        asking_s: time that asking for a draft takes, seconds, drafting excluded.
    """
    if not (0.0 < tokens_per_s < math.inf and row_price >= 0.0):
        return None
    return DraftTerms(max_tokens, row_price, _SAVED_SHARE * asking_s * tokens_per_s / max(1, num_running))


def row_seconds(row_price: float, tokens_per_s: float) -> float:
    """Time that a token adds to a forward of a worker with known price and speed; 0 = unknown."""
    are_known = 0.0 < tokens_per_s < math.inf and 0.0 < row_price < math.inf
    return row_price / tokens_per_s if are_known else 0.0


class PriceExploration:
    """Drafts of a drafter that are made whatever a row is believed to cost.

    A price at which nothing is drafted is met by no forward, so a wrong one would stay for ever. Without drafts a row
    costs at most the token it brings, which bounds the loss at one per cent.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        """Tokens since the last draft."""
        self._trial: DraftTerms | None = None
        """Terms of the last trial."""

    def terms(self, usual: DraftTerms) -> DraftTerms:
        """Terms of the next draft: `usual`, or a trial's."""
        max_tokens = min(USUAL_DRAFT_TOKENS, usual.max_tokens)
        if self._num_tokens < max_tokens * _TOKENS_PER_TRIAL:
            return usual
        self._num_tokens = 0  # one asks at a time
        self._trial = replace(usual, max_tokens=max_tokens, row_price=0.0)
        return self._trial

    def came(self, terms: DraftTerms, num_draft_tokens: int) -> None:
        """A draft on these terms has so many tokens."""
        if num_draft_tokens:
            self._num_tokens = 0
        elif terms is self._trial:  # there was nothing to draft: another asking tries it
            self._num_tokens = terms.max_tokens * _TOKENS_PER_TRIAL

    def add_tokens(self, num_tokens: int) -> None:
        """Tokens decided, of all sequences of the drafter."""
        self._num_tokens += num_tokens


class AskingTime:
    """Time that asking one draft worker takes beyond its drafting, a decayed mean."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        """Seconds; 0 before the first."""

    def record(self, seconds: float) -> None:
        """A draft came after so long beyond its drafting."""
        self.mean_s += _ASKING_SHARE * (seconds - self.mean_s)


class EmptyDraftPause:
    """Plain steps of one sequence after drafts that did not pay, so that asking again costs little."""

    def __init__(self) -> None:
        self._num_steps = _FIRST_PAUSE

    def drafted(self) -> None:
        """A draft paid: the next pause is short again."""
        self._num_steps = _FIRST_PAUSE

    def empty(self) -> int:
        """Steps until the next asking, after a draft that stayed empty."""
        num_steps, self._num_steps = self._num_steps, min(2 * self._num_steps, _LONGEST_PAUSE)
        return num_steps
