"""Text of an answer as it arrives, read by generators that wait for more text at each `yield`.

What a read consumes does not depend on how the text is split, and each character is examined a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from betoken.gateway.tool_calls.json_scanner import JsonScanner

_Result = TypeVar("_Result")
Read: TypeAlias = Generator[None, None, _Result]
"""A read that returns its result after any number of waits."""


class TextStream:
    """Unread text of one answer, and the text read since `forget`."""

    def __init__(self) -> None:
        self._text = ""
        self._has_ended = False
        self._read: list[str] = []

    @property
    def num_unread(self) -> int:
        """Characters that wait for more text."""
        return len(self._text)

    def feed(self, text: str) -> None:
        """Append text."""
        self._text += text

    def close(self) -> None:
        """No more text arrives."""
        self._has_ended = True

    def forget(self) -> str:
        """The text read since the last call."""
        text = "".join(self._read)
        self._read.clear()
        return text

    def unread(self, mark: str) -> None:
        """Put back the mark that the last read took."""
        self._text = mark + self._text
        if self._read and self._read[-1] == mark:
            self._read.pop()

    def peek(self) -> Read[str]:
        """The next character; empty at the end."""
        while not self._text and not self._has_ended:
            yield
        return self._text[:1]

    def take(self, marks: Sequence[str]) -> Read[str]:
        """Read the first of `marks` that the text begins with; empty if none."""
        while True:
            for mark in marks:
                if self._text.startswith(mark):
                    return self._consume(len(mark))
                if not self._has_ended and len(self._text) < len(mark) and mark.startswith(self._text):
                    break
            else:
                return ""
            yield

    def spaces(self) -> Read[str]:
        """Read white space."""
        return (yield from self.run(str.isspace))

    def run(self, belongs: Callable[[str], bool], most: int | None = None) -> Read[str]:
        """Read characters that belong, at most `most`."""
        pieces: list[str] = []
        num = 0
        while most is None or num < most:
            size = 0
            room = len(self._text) if most is None else min(len(self._text), most - num)
            while size < room and belongs(self._text[size]):
                size += 1
            num += size
            pieces.append(self._consume(size))
            if self._text or self._has_ended:
                break
            yield
        return "".join(pieces)

    def until(self, marks: Sequence[str], write: Callable[[str], None]) -> Read[str]:
        """Read up to the first of `marks` and the mark itself, which is returned; empty at the end."""
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            at, _, mark = min(found, default=(len(self._text), 0, ""))
            if not mark and not self._has_ended:
                at -= max((_overlap(self._text, each) for each in marks), default=0)
            if text := self._consume(at):
                write(text)
            if mark and not any(self._may_begin(other) for other in marks if len(other) > len(mark)):
                return self._consume(len(mark))
            if not mark and self._has_ended:
                return ""
            yield

    def json(self, scanner: JsonScanner, write: Callable[[str], None]) -> Read[None]:
        """Read a JSON value, up to its end or to the first character that does not fit."""
        while True:
            if text := self._consume(scanner.read(self._text)):
                write(text)
            if scanner.is_whole or scanner.is_broken or self._has_ended:
                return
            yield

    def _may_begin(self, mark: str) -> bool:
        return not self._has_ended and len(self._text) < len(mark) and mark.startswith(self._text)

    def _consume(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if text:
            self._read.append(text)
        return text


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)
