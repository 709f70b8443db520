"""Turns growing token ids into growing text without ever releasing half a character.

Knows a `decode` function only. Its text depends on the ids alone, whatever blocks they came in.
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
        """`decode` returns the text of ids, `piece` the text of one id; `context_ids` are the prompt's; their text
        stays out of the answer. `is_concatenative`: the bytes of ids are the concatenated bytes of each id."""
        self._decode = decode
        self._piece = piece
        self._is_concatenative = is_concatenative
        self._window: list[int] = []
        self._final: str | None = None
        """The window's text up to where later ids change nothing; None = all of it, not decoded yet."""
        self._num_open = 0
        """Last ids of the window that may be the beginning of a character."""
        self._begin(list(context_ids[-_MAX_WINDOW:]))

    @property
    def num_held(self) -> int:
        """Characters held back: 1 while a character is incomplete."""
        return int(self._num_open > 0)

    def step(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Append `ids`: the text that became final, and how many of its characters did so with each id."""
        if self._is_concatenative and not self._num_open:
            pieces = [self._piece(token_id) for token_id in ids]
            text = "".join(pieces)
            if _REPLACEMENT not in text:  # whole characters after whole characters: no need to decode again
                self._window = [*self._window, *ids][-_MIN_WINDOW:]
                self._final = None
                return text, [len(piece) for piece in pieces]
        texts = [self._append(token_id) for token_id in ids]
        return "".join(texts), [len(text) for text in texts]

    def flush(self) -> str:
        """The text held back at the answer's end: the replacement characters of incomplete UTF-8, or nothing."""
        text = ""
        if self._num_open and self._final is not None:
            text = self._decode(self._window)
            is_longer = text.startswith(self._final)
            text = text[len(self._final) :] if is_longer else self._decode(self._window[-self._num_open :])
        self._window, self._final, self._num_open = [], None, 0
        return text

    def _append(self, token_id: int) -> str:
        """The text that became final with one more id."""
        final = self._decode(self._window) if self._final is None else self._final
        self._final = final
        text = self._decode([*self._window, token_id])
        if text and text == final and not text.endswith(_REPLACEMENT):
            return ""  # a special token: in a window of nothing else the next id's text would seem to begin the answer
        self._window.append(token_id)
        self._num_open += 1
        if not text.startswith(final):  # some decoders show a run of bytes as replacements while its end is incomplete
            if text.endswith(_REPLACEMENT) and self._num_open <= _MAX_INCOMPLETE:
                return ""
            del self._window[: -self._num_open]
            text, final = self._decode(self._window), ""
        end = max(len(final), _stable(text))
        self._final = text[:end]
        if not text.endswith(_REPLACEMENT):
            self._num_open = 0
        num_ids = len(self._window)
        if (num_ids > _MAX_WINDOW and not self._num_open) or num_ids > 2 * _MAX_WINDOW:
            self._shorten()
        return text[len(final) : end]

    def _begin(self, context: list[int]) -> None:
        """Take the prompt's last ids for the window; if they end within a character, it begins with a whole one."""
        self._window, self._final = self._recent(context)
        if not self._final.endswith(_REPLACEMENT):
            return
        for num_open in range(1, min(_MAX_INCOMPLETE, len(context)) + 1):
            window, text = self._recent(context[:-num_open])
            if not text.endswith(_REPLACEMENT):
                self._window, self._num_open = window + context[-num_open:], num_open
                self._final = self._decode(self._window)
                return

    def _shorten(self) -> None:
        """Keep the last ids of the window."""
        self._window, text = self._recent(self._window)
        self._final = text[: _stable(text)] if self._num_open else text
        self._num_open = min(self._num_open, len(self._window))

    def _recent(self, ids: list[int]) -> tuple[list[int], str]:
        """The last of `ids`, from the start of a character, and their text: see the runs above."""
        for num_ids in range(_MIN_WINDOW, _MIN_WINDOW + _MAX_INCOMPLETE + 1):
            window = ids[-num_ids:]
            text = self._decode(window) if window else ""
            if not text.startswith(_REPLACEMENT):
                break
        return window, text


def _stable(text: str) -> int:
    """Length of the part of `text` that later ids cannot change."""
    if not text.endswith(_REPLACEMENT):
        return len(text)
    num_replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(num_replaced, _MAX_INCOMPLETE)
