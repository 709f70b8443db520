"""Detects that the acceptance of a drafter has collapsed: a test of a recent window against a long one.

A collapse means that the drafter drafts for another text than the target's, for example after lost state. Counts rounds
and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

NUM_RECENT = 32
"""Rounds of the recent window."""
MIN_LONG = 96
"""Rounds that the long window needs before it is evidence."""
MAX_LONG = 1024
"""Rounds after which the long window forgets half."""
MAX_SHARE = 0.1
"""A collapse leaves less than this share of the long window's acceptance."""
MIN_DEVIATION = 3.5
"""Standard deviations of the recent acceptance below the long one."""
MIN_PAUSE_ROUNDS = 256
"""Rounds after an alarm without another; doubles with each alarm until acceptance recovers."""
MAX_PAUSE_ROUNDS = 4096


@dataclass(slots=True)
class _Window:
    """Sums over rounds."""

    num_rounds: int = 0
    num_examined: int = 0
    """Draft tokens up to the first rejected one."""
    num_accepted: int = 0

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_examined if self.num_examined else 0.0

    def add(self, other: _Window) -> None:
        self.num_rounds += other.num_rounds
        self.num_examined += other.num_examined
        self.num_accepted += other.num_accepted


def has_collapsed(recent_accepted: int, recent_examined: int, long_acceptance: float) -> bool:
    """Return whether the recent acceptance is far below the long one: in share, and in standard deviations.

    Source: the one-sided test of a binomial proportion against a known one, in its normal approximation.
    """
    if not recent_examined or not 0.0 < long_acceptance < 1.0:
        return recent_examined > 0 and long_acceptance == 1.0 and recent_accepted < MAX_SHARE * recent_examined
    recent = recent_accepted / recent_examined
    deviation = sqrt(long_acceptance * (1.0 - long_acceptance) / recent_examined)
    return recent < MAX_SHARE * long_acceptance and long_acceptance - recent > MIN_DEVIATION * deviation


class AcceptanceAlarm:
    """Windows of one drafter at one draft worker."""

    def __init__(self) -> None:
        self._recent = _Window()
        self._long = _Window()
        self._num_quiet = 0
        """Rounds left in which no alarm is given."""
        self._pause = MIN_PAUSE_ROUNDS

    def record(self, num_draft_tokens: int, num_accepted: int) -> bool:
        """Count a verified draft; return whether acceptance has collapsed, which is reported once per pause."""
        num_examined = min(num_draft_tokens, num_accepted + 1)
        self._recent.add(_Window(1, num_examined, num_accepted))
        self._num_quiet = max(0, self._num_quiet - 1)
        if self._recent.num_rounds < NUM_RECENT:
            return False
        recent, self._recent = self._recent, _Window()
        if self._long.num_rounds >= MIN_LONG and has_collapsed(
            recent.num_accepted, recent.num_examined, self._long.acceptance
        ):
            return self._alarm()  # and the long window keeps what was normal
        self._pause = MIN_PAUSE_ROUNDS
        self._long.add(recent)
        if self._long.num_rounds > MAX_LONG:
            self._long = _Window(*(each // 2 for each in (MAX_LONG, self._long.num_examined, self._long.num_accepted)))
        return False

    def _alarm(self) -> bool:
        if self._num_quiet:
            return False
        self._num_quiet, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE_ROUNDS)
        return True
