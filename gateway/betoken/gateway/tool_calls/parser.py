"""Parses an answer as it streams into reasoning, content and tool calls. The parts do not depend on how it is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from betoken.common.tool_formats import REASONING_MARKS
from betoken.gateway.tool_calls.formats import FORMATS
from betoken.gateway.tool_calls.harmony import BEGINNINGS, harmony_messages
from betoken.gateway.tool_calls.parts import Part
from betoken.gateway.tool_calls.reader import CallReader
from betoken.gateway.tool_calls.stream import Read


class ToolCallParser:
    """Parser of one answer."""

    def __init__(
        self, format_name: str = "", tools: Mapping[str, Any] | None = None, *, reasoning_end: str | None = None
    ) -> None:
        """`tools` holds the schemas of the arguments of tools that may be called, by name; without any, calls are
        content. `reasoning_end`: the mark that ends the reasoning that the prompt began."""
        self._format = FORMATS[format_name] if tools else None
        self._reader = CallReader(tools or {})
        self._reader.writer.is_reasoning = reasoning_end is not None
        self._run: Read[None] | None = self._answer(reasoning_end)

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer's next text is reasoning."""
        return self._reader.writer.is_reasoning

    @property
    def num_unread(self) -> int:
        """Characters that wait for more text, fewer than the longest mark has."""
        return self._reader.stream.num_unread

    def feed(self, text: str) -> list[Part]:
        """Parts that are complete with `text`."""
        self._reader.stream.feed(text)
        self._advance()
        return self._written()

    def end(self) -> list[Part]:
        """The parts that were held back."""
        self._reader.stream.close()
        self._advance()
        self._reader.writer.end()
        return self._written()

    def _advance(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None

    def _written(self) -> list[Part]:
        parts, self._reader.writer.parts = self._reader.writer.parts, []
        return parts

    def _answer(self, reasoning_end: str | None) -> Read[None]:
        stream, writer = self._reader.stream, self._reader.writer
        spaces = ""
        if reasoning_end is None:
            spaces = yield from stream.spaces()
            mark = yield from stream.take((*BEGINNINGS, *REASONING_MARKS))
            if mark in BEGINNINGS:
                yield from harmony_messages(self._reader)
                return
            reasoning_end = REASONING_MARKS[mark] if mark else None
            if mark == "<|channel>":
                yield from stream.take(("thought",))
        if reasoning_end is not None:
            yield from self._reasoning(reasoning_end)
        elif spaces:
            writer.say(spaces)
        yield from self._content()

    def _reasoning(self, end: str) -> Read[None]:
        self._reader.writer.begin_reasoning()
        yield from self._reader.stream.until((end,), self._reader.writer.reason)
        self._reader.writer.end_reasoning()

    def _content(self) -> Read[None]:
        """Content with calls, to the answer's end. What is not a call is content, and parsing goes on after it."""
        reader, form = self._reader, self._format
        if form is None:
            yield from reader.stream.until((), self._say)
            return
        if form.begins_with_object:
            spaces = yield from reader.stream.spaces()
            is_object = (yield from reader.stream.peek()) == "{"
            reader.writer.say(spaces)
            reader.stream.forget()
            if is_object and not (yield from form.read(reader, "")):
                reader.writer.say(reader.stream.forget())
        while mark := (yield from reader.stream.until((*form.openings, *reader.unclosed), self._say)):
            if mark in reader.unclosed:
                reader.unclosed = tuple(each for each in reader.unclosed if each != mark)
            elif not (yield from form.read(reader, mark)):
                reader.writer.say(reader.stream.forget())
            reader.stream.forget()

    def _say(self, text: str) -> None:
        self._reader.writer.say(text)
        self._reader.stream.forget()
