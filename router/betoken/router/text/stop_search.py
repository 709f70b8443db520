"""Finds the stop strings of one request in its text, and stop strings with special tokens in the text with their names.

Special tokens leave no text, so stop strings with their names are searched in the text that shows the names. Knows
characters and names; what is released is text without names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from betoken.router.text.stop_strings import StopMatch, StopStrings


class StopSearch:
    """The stop strings of one request and the text held back for them."""

    def __init__(self, stops: Sequence[str], special_names: Mapping[int, str]) -> None:
        """`special_names` are the special tokens' by id."""
        self._names = special_names
        self._plain = StopStrings(stops)
        joined = "\0".join(stops)
        mentioned = {name for name in special_names.values() if name in joined} if stops else ()
        self._written = StopStrings([stop for stop in stops if any(name in stop for name in mentioned)])
        self._is_text: list[bool] = []
        """For each character held for `_written` whether it is text; it is a name's otherwise."""
        self.held = ""
        """Unreleased text."""

    def match(self, text: str, token_id: int | None = None) -> StopMatch | None:
        """The stop string that begins first, and ends within `text` or the text of `token_id`,
        perhaps in held text. Of two that begin together, the first given. Appends nothing."""
        num_text = len(self.held) + len(text)
        plain = self._plain.match(text)
        if plain is not None:
            plain = StopMatch(plain.stop, num_text - len(self._plain.held) - len(text) + plain.start)
        name = self._name(token_id)
        written = self._written.match(text + name)
        if written is None:
            return plain
        is_text = [*self._is_text, *self._text_of(text, name)]
        start = num_text - sum(is_text[written.start :])
        return plain if plain is not None and plain.start < start else StopMatch(written.stop, start)

    def feed(self, text: str, token_id: int) -> str:
        """Append `text` and the name of `token_id`, whatever they complete, and return what can be released."""
        self._plain.feed(text)
        num_held = len(self._plain.held)
        if not self._written.is_empty:
            name = self._name(token_id)
            self._written.feed(text + name)
            self._is_text += self._text_of(text, name)
            del self._is_text[: len(self._is_text) - len(self._written.held)]
            num_held = max(num_held, sum(self._is_text))
        text = self.held + text
        end = len(text) - num_held
        self.held = text[end:]
        return text[:end]

    def flush(self) -> str:
        """Release the held text; the answer ended otherwise."""
        text, self.held = self.held, ""
        return text

    def _name(self, token_id: int | None) -> str:
        return "" if token_id is None or self._written.is_empty else self._names.get(token_id, "")

    @staticmethod
    def _text_of(text: str, name: str) -> list[bool]:
        return [True] * len(text) + [False] * len(name)
