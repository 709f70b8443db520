"""Reads an answer as it streams: what is thought, what is said, and which tools are called.

Knows how Hermes and Qwen, Llama 3 and Mistral write calls, and `<think>`. An incomplete call stays text. The parts do
not depend on how the text was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

THINK, THOUGHT = "<think>", "</think>"
_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA, _MISTRAL, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_BEGINS = (_HERMES, _LLAMA, _MISTRAL)
MARKS = frozenset((THINK, THOUGHT, _HERMES_END, _ARGS, *_BEGINS))
"""Texts that may be special tokens, which leave none: whoever feeds a reader puts them back."""
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*[\w.-]*\s*(?:\[[A-Z_]*\]?\s*\w*\s*)*")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Thought:
    """Text between `<think>` and `</think>`."""

    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's call."""

    name: str
    arguments: str
    """A JSON object."""


Part: TypeAlias = Thought | Said | Call


class Reader:
    """One answer."""

    def __init__(self, tools: Set[str] = frozenset(), *, is_thinking: bool = False) -> None:
        """`tools`: names of those that may be called; none = no calls are looked for. `is_thinking`: the prompt ends
        within a thought."""
        self._tools = tools
        self._text = ""
        self._is_fresh = True
        """The next part's leading white space is dropped: it stands after a mark."""
        self._raw = ""
        """What began the call under way, to be told as text where it is none."""
        self._read: Callable[[bool], Part | bool] = self._thought if is_thinking else self._first

    @property
    def is_thinking(self) -> bool:
        """Whether a thought is under way."""
        return self._read == self._thought

    def feed(self, text: str) -> list[Part]:
        """Parts that are whole with `text`."""
        self._text += text
        return self._parts(is_end=False)

    def end(self) -> list[Part]:
        """The text that was held back."""
        return self._parts(is_end=True)

    def _parts(self, is_end: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            found = self._read(is_end)
            if found is False:
                return parts
            if found is not True:
                parts.append(found)

    # Each state returns a part, or True where it made way for another state, or False where more text is needed.

    def _first(self, is_end: bool) -> Part | bool:
        """The start of an answer: a thought may begin, or a call without a mark."""
        begun = self._text.lstrip()
        if begun.startswith(THINK):
            self._begin(self._thought, begun.removeprefix(THINK))
            return True
        if not is_end and THINK.startswith(begun):  # also where nothing has come
            return False
        self._is_fresh = False
        return self._answer_begins(begun)

    def _answer_begins(self, begun: str) -> bool:
        is_json = bool(self._tools) and begun.startswith("{")
        self._read = self._json if is_json else self._said
        return True

    def _thought(self, is_end: bool) -> Part | bool:
        text, mark, rest = self._text.partition(THOUGHT)
        if not mark:
            return self._part(Thought, self._cut(is_end, (THOUGHT,))) or False
        part = self._part(Thought, text.rstrip())
        self._begin(self._after_thought, rest)
        return part or True

    def _after_thought(self, is_end: bool) -> Part | bool:
        begun = self._text.lstrip()
        return self._answer_begins(begun) if begun else False

    def _said(self, is_end: bool) -> Part | bool:
        if not self._tools:
            text, self._text = self._text, ""
            return self._part(Said, text) or False
        starts = [(at, mark) for mark in _BEGINS if (at := self._text.find(mark)) >= 0]
        if not starts:
            return self._part(Said, self._cut(is_end, _BEGINS)) or False
        at, mark = min(starts)
        part, rest = self._part(Said, self._text[:at].rstrip()), self._text[at + len(mark) :]
        self._begin({_HERMES: self._hermes, _LLAMA: self._json, _MISTRAL: self._mistral}[mark], rest)
        self._raw = mark
        return part or True

    def _hermes(self, is_end: bool) -> Part | bool:
        text, mark, rest = self._text.partition(_HERMES_END)
        if not mark and not is_end:
            return False
        calls = self._calls(_decoded(text)[0])
        if len(calls) != 1:
            return self._no_call(text + mark, rest)
        self._begin(self._said, rest)
        return calls[0]

    def _json(self, is_end: bool) -> Part | bool:
        """An object, as Llama 3 writes a call, with or without its mark."""
        begun = self._text.lstrip()
        value, length = _decoded(self._text) if begun.startswith("{") else (None, 0)
        if value is None and (not begun or begun.startswith("{")) and not is_end:
            return False
        calls = self._calls(value)
        if not calls:
            return self._no_call(self._text[:length], self._text[length:])
        self._begin(self._between, self._text[length:])
        return calls[0]

    def _between(self, is_end: bool) -> bool:
        """Another object may follow."""
        more = self._text.lstrip("; \n\t\r")
        if not more and not is_end:
            return False
        self._begin(self._json if more.startswith("{") else self._said, more)
        return True

    def _mistral(self, is_end: bool) -> Part | bool:
        """A list of calls, or a name before its arguments."""
        if not is_end and _NAMED_SO_FAR.fullmatch(self._text) and not self._text.lstrip().startswith("["):
            return False
        named, begun = _NAMED.match(self._text), self._text.lstrip()
        if not named and not begun.startswith("["):
            return self._no_call("", self._text)
        value, length = _decoded(self._text[named.end() :] if named else self._text)
        if value is None and not is_end:
            return False
        if named:
            value, length = {"name": named[1], "arguments": value}, length + named.end()
        calls = self._calls(value)
        if not calls:
            return self._no_call(self._text[:length], self._text[length:])
        rest = self._text[length:]
        if len(calls) > 1:  # told one by one
            rest = _MISTRAL + json.dumps(value[1:], ensure_ascii=False) + rest
        self._begin(self._said, rest)
        return calls[0]

    def _calls(self, value: Any) -> list[Call]:
        """The calls that a value stands for; none where it stands for anything else."""
        calls = []
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict) or entry.get("name") not in self._tools:
                return []
            arguments = entry.get("arguments", entry.get("parameters", {}))
            if not isinstance(arguments, dict):
                return []
            calls.append(Call(entry["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls

    def _no_call(self, text: str, rest: str) -> Part | bool:
        """The supposed call is text, and so is everything after it."""
        said = self._raw + text
        self._text, self._is_fresh, self._raw, self._read = rest, False, "", self._said
        return Said(said) if said else True

    def _begin(self, state: Callable[[bool], Part | bool], text: str) -> None:
        self._read, self._text, self._is_fresh, self._raw = state, text, True, ""

    def _part(self, kind: type[Thought | Said], text: str) -> Part | None:
        """A part of `text`; None where it yields nothing."""
        text = text.lstrip() if self._is_fresh else text
        if not text:
            return None
        self._is_fresh = False
        return kind(text)

    def _cut(self, is_end: bool, marks: tuple[str, ...]) -> str:
        """The part of the text that is certain. The rest, held back, may begin a mark, with the white space before
        one."""
        held = 0 if is_end else max(_overlap(self._text, mark) for mark in marks)
        text = self._text[: len(self._text) - held]
        told = text if is_end else text.rstrip()
        self._text = self._text[len(told) :]
        return told


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-size:])), 0)


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value that `text` begins with, and where it ends; (None, 0) where there is none yet."""
    start = len(text) - len(text.lstrip())
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0
