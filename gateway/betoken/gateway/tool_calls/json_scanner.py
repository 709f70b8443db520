"""Finds the end of a JSON value in text that arrives in pieces, or the first character that does not fit.

Checks structure: brackets, keys, colons and commas. Scalars are runs of letters, digits and signs.
"""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\]*+')
_SPACES = " \t\r\n"
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _COLON, _NEXT = range(6)


class JsonScanner:
    """Structure of one value, an object or another."""

    def __init__(self) -> None:
        self._brackets: list[str] = []
        """Closing brackets still to come."""
        self._expected = _VALUE
        self._in_string = False
        self._is_escaped = False
        self._in_scalar = False
        self.is_whole = False
        """Whether the value has ended."""
        self.is_broken = False
        """Whether the next character does not fit."""

    @property
    def missing(self) -> str:
        """Brackets that complete the value; empty if it cannot be completed by brackets alone."""
        can_end = not self._in_string and self._expected in (_NEXT, _FIRST_VALUE, _FIRST_KEY)
        return "".join(reversed(self._brackets)) if can_end else ""

    def read(self, text: str) -> int:
        """Number of characters of `text` that belong to the value."""
        at = 0
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                if self.is_whole:
                    return at
                continue
            if not self._character(text[at]):
                return at
            at += 1
            if self.is_whole:
                return at
        return at

    def _string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        plain = _PLAIN.match(text, at)
        at = plain.end() if plain else at
        if at < len(text):
            if text[at] == '"':
                self._in_string = False
                self._value_ended()
            else:
                self._is_escaped = True
            at += 1
        return at

    def _character(self, character: str) -> bool:
        """Take one character outside strings; whether it fits."""
        if self._in_scalar:
            if character.isalnum() or character in "+-.":
                return True
            self._in_scalar = False
            self._value_ended()
            if self.is_whole:
                return False
        if character in _SPACES:
            return True
        fits = self._fits(character)
        self.is_broken = not fits
        return fits

    def _fits(self, character: str) -> bool:
        expected, closing = self._expected, self._brackets[-1] if self._brackets else ""
        if character in "}]":
            if character != closing or expected not in (_NEXT, _FIRST_KEY if character == "}" else _FIRST_VALUE):
                return False
            self._brackets.pop()
            self._value_ended()
            return True
        if expected in (_COLON, _NEXT):
            fits = character == (":" if expected == _COLON else ",")
            if fits:
                self._expected = _KEY if expected == _NEXT and closing == "}" else _VALUE
            return fits
        if character == '"':
            self._in_string = True
            return True
        return expected in (_VALUE, _FIRST_VALUE) and self._value_begins(character)

    def _value_begins(self, character: str) -> bool:
        if character in "{[":
            self._brackets.append("}" if character == "{" else "]")
            self._expected = _FIRST_KEY if character == "{" else _FIRST_VALUE
            return True
        self._in_scalar = character.isalnum() or character == "-"
        return self._in_scalar

    def _value_ended(self) -> None:
        if self._expected in (_KEY, _FIRST_KEY) and self._brackets and self._brackets[-1] == "}":
            self._expected = _COLON
            return
        self._expected = _NEXT
        self.is_whole = not self._brackets
