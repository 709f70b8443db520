"""Where a JSON object ends in text that comes in pieces. Knows braces and strings, and nothing of values."""

from __future__ import annotations


class JsonObject:
    """One object, read to its end."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: braces that were opened before."""
        self._depth = depth
        self._in_text = False
        self._is_escaped = False
        self.is_whole = False

    def read(self, text: str) -> int:
        """How much of `text` belongs to it."""
        for index, character in enumerate(text):
            if self._in_text:
                self._in_text = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.is_whole = True
                    return index + 1
        return len(text)
