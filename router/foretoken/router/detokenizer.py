"""Turns growing token ids into growing text without ever releasing half a character.

Knows a `decode` function only. What is released depends on the ids alone, not on how they were split into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_INCOMPLETE = 3  # a character of four bytes may lack its last, each byte shown as one replacement
_MIN_WINDOW, _MAX_WINDOW = 6, 18  # ids decoded again with each step; a character spans at most four


class Detokenizer:
    """Text of one sequence. A window of recent ids gives each step the context a decoder needs."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        piece: Callable[[int], str],
        context_ids: Sequence[int],
        *,
        is_concatenative: bool = False,
    ) -> None:
        """`decode` gives the text of ids, `piece` that of one id alone; `context_ids` are the prompt's, whose text is
        not part of the answer. `is_concatenative`: the bytes of ids are those of each id, one after the other."""
        self._decode = decode
        self._piece = piece
        self._is_concatenative = is_concatenative
        self._window: list[int] = list(context_ids[-_MIN_WINDOW:])
        self._text = decode(self._window) if self._window else ""
        self._has_text = True  # whether _text is the text of _window

    def step(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Append `ids`: the text that became final, and how many of its characters did so with each id."""
        if self._is_concatenative and not (self._has_text and self._text.endswith(_REPLACEMENT)):
            pieces = [self._piece(token_id) for token_id in ids]
            text = "".join(pieces)
            if _REPLACEMENT not in text:  # whole characters after whole characters: no need to decode again
                self._window = [*self._window, *ids][-_MIN_WINDOW:]
                self._has_text = False
                return text, [len(piece) for piece in pieces]
        return self._step_in_window(ids)

    def _step_in_window(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        if not self._has_text:
            self._text, self._has_text = self._decode(self._window), True
        released = _stable(self._text)
        window = [*self._window, *ids]
        self._text = self._decode(window)
        text = self._text[released : _stable(self._text)]
        num_chars = [len(text)] if len(ids) == 1 else self._split(ids, released, text)
        if len(window) > _MAX_WINDOW:
            window = window[-_MIN_WINDOW:]
            self._text = self._decode(window)
        self._window = window
        return text, num_chars

    def flush(self) -> str:
        """What was held back at the end of the answer: the replacement characters of incomplete UTF-8, or nothing."""
        text = self._text[_stable(self._text) :] if self._has_text else ""
        self._window, self._text, self._has_text = [], "", True
        return text

    def _split(self, ids: Sequence[int], released: int, text: str) -> list[int]:
        """Characters of `text` per id. `_window` is still the one before `ids`."""
        pieces = [self._piece(token_id) for token_id in ids]
        if "".join(pieces) == text:
            return [len(piece) for piece in pieces]
        ends = [_stable(self._decode([*self._window, *ids[:count]])) for count in range(1, len(ids))]
        ends.append(released + len(text))
        num_chars = []
        for end in ends:
            num_chars.append(max(0, end - released))
            released = max(released, end)
        return num_chars


def _stable(text: str) -> int:
    """Length of the part of `text` that later ids cannot change."""
    if not text.endswith(_REPLACEMENT):
        return len(text)
    num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(num_replaced, _MAX_INCOMPLETE)
