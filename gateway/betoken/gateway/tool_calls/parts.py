"""Parts of an answer: reasoning, content, and tool calls with their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """Beginning of a tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the current call's arguments. Together they are a JSON object, unless the answer was cut."""

    text: str


Part: TypeAlias = Reasoning | Content | Call | Arguments


class PartWriter:
    """Collects parts. White space around reasoning and calls is dropped, except between words."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.is_reasoning = False
        self._spaces: list[str] = []
        """White space after the last word, not written yet."""
        self._has_content = False
        self._is_after_call = False
        self._is_trimmed = False
        """Whether white space before the next word is dropped."""

    def reason(self, text: str) -> None:
        """Write reasoning."""
        self._write(Reasoning, text)

    def say(self, text: str) -> None:
        """Write content."""
        if self._is_after_call and text.strip():
            self._is_trimmed = not self._has_content
            if self._has_content and not self._spaces and not text[0].isspace():
                self._spaces.append("\n")  # the call was the only separator of two words
            self._is_after_call = False
        self._has_content |= bool(text.strip())
        self._write(Content, text)

    def begin_reasoning(self) -> None:
        """The next text is reasoning."""
        self._spaces.clear()
        self._is_trimmed = self.is_reasoning = True

    def end_reasoning(self) -> None:
        """The next text is content."""
        self._spaces.clear()
        self._is_trimmed, self.is_reasoning = True, False

    def call(self, name: str) -> None:
        """Begin a tool call."""
        self._is_after_call = True
        self.parts.append(Call(name))

    def arguments(self, text: str) -> None:
        """Write a piece of the arguments."""
        if text:
            self.parts.append(Arguments(text))

    def end(self) -> None:
        """Write the white space at the end of content."""
        if self._spaces and not self._is_after_call and not self._is_trimmed:
            self.parts.append(Content("".join(self._spaces)))
        self._spaces.clear()

    def _write(self, kind: type[Reasoning | Content], text: str) -> None:
        words = text.rstrip()
        if not words:
            self._spaces += [text] * bool(text)
            return
        before = "".join(self._spaces)
        whole = before + words
        self._spaces = [text[len(words) :]] if len(words) < len(text) else []
        if self._is_trimmed:
            whole = whole.lstrip()
            self._is_trimmed = False
        self.parts.append(kind(whole))
