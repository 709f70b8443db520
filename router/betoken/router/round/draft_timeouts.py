"""How long a round waits for a draft. A later one does not hold the answer up unless tokens depend on it."""

from __future__ import annotations

from typing import NamedTuple

MAX_MISSED_TOKENS = 64
"""Tokens that a drafter missed while none was requested and whose computation a round waits for."""
_STEPS_PER_WAIT = 8
"""Decode steps that a draft may take before it is late: it saves about as many at most."""


class DraftTimeouts(NamedTuple):
    """Longest waits for drafts, seconds."""

    usual_s: float
    """Longest wait of a round, whatever the state of the session."""
    first_s: float
    """In modes whose tokens depend on drafts none may be late, and the first one, which includes the prompt's prefill,
    has this time."""

    def of_round(self, forward_s: float) -> float:
        """Return the longest wait of a round: `usual_s`, or the time of `_STEPS_PER_WAIT` decode steps of `forward_s`
        if that is longer, up to `first_s`. A draft that takes longer is late: the answer goes on with decode steps
        until it has come."""
        return min(max(self.usual_s, _STEPS_PER_WAIT * forward_s), max(self.usual_s, self.first_s))
