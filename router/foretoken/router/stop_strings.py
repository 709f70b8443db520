"""Finds stop strings in growing text and holds back what may be the beginning of one.

Knows characters only; where tokens begin and end is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in the text that was held back or has just arrived."""

    stop: str
    start: int
    """Offset of its first character, counted from the first unreleased one."""


class StopStrings:
    """The stop strings of one request and the text held back for them."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    @property
    def held(self) -> str:
        """Unreleased text: the longest suffix that begins a stop string."""
        return self._held

    def match(self, text: str) -> StopMatch | None:
        """The stop string that begins first in held text + `text`; of two, the one given first. Appends nothing."""
        if not text:
            return None
        buffer = self._held + text
        best: StopMatch | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0 and (best is None or start < best.start):
                best = StopMatch(stop, start)
        return best

    def feed(self, text: str) -> str:
        """Append `text`, which completes no stop string, and return what can be released."""
        if not self._stops:
            return text
        buffer = self._held + text
        num_held = self._num_held(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def flush(self) -> str:
        """Release the held text; the answer ended otherwise."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, buffer: str) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
