"""Time of a forward by its number of tokens: the table that a worker measured at its start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class ForwardTimes(NamedTuple):
    """Times of the forwards of a verify worker at its present load, seconds; 0 = not known."""

    token_s: float = 0.0
    """Added by one more token."""
    decode_s: float = 0.0
    """A decode step of all its sequences."""


NO_TIMES = ForwardTimes()


class StepTimes:
    """A table of forward times, interpolated between its points and continued beyond the outermost two."""

    def __init__(self, points: Sequence[tuple[int, int]]) -> None:
        """`points`: tokens of a forward and its time, ns; fewer than two points leave all times unknown (0)."""
        self._points = sorted(points)

    def ns(self, num_tokens: float) -> float:
        """Return the time of a forward, nanoseconds; 0 = not known."""
        if len(self._points) < 2:
            return 0.0
        lines = list(pairwise(self._points))
        (tokens_0, ns_0), (tokens_1, ns_1) = next((line for line in lines if num_tokens <= line[1][0]), lines[-1])
        return ns_0 + (ns_1 - ns_0) * (num_tokens - tokens_0) / (tokens_1 - tokens_0)

    def token_ns(self, num_tokens: float) -> float:
        """Return the time that one more token adds to forwards of about so many, nanoseconds."""
        few, many = max(1.0, num_tokens / 2), max(4.0, num_tokens * 2)  # far enough apart for times with noise
        return (self.ns(many) - self.ns(few)) / (many - few)

    def at_load(self, num_running: int, token_s: float, ratio: float) -> ForwardTimes:
        """Return the times with so many sequences.

        Args:
            token_s: measured time that one more token adds, seconds; 0 = by the table.
            ratio: recent forwards over the table; 0 = not known.
        """
        scale = 1e-9 * (ratio or 1.0)
        return ForwardTimes(token_s or max(0.0, scale * self.token_ns(num_running)), scale * self.ns(num_running))
