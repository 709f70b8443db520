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

from betoken.gateway.json_object import JsonObject

THINK, THOUGHT = "<think>", "</think>"
_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA, _MISTRAL, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_BEGINS = (_HERMES, _LLAMA, _MISTRAL)
MARKS = frozenset((THINK, THOUGHT, _HERMES_END, _ARGS, *_BEGINS))
"""Texts that may be special tokens, which leave none: whoever feeds a reader puts them back."""
_NAMED = re.compile(r"\s*+([\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?+(?:\[ARGS\])?+\s*+(?=\{)")
_NAMED_SO_FAR = re.compile(r"\s*+[\w.-]*+\s*+(?:\[[A-Z_]*+\]?+\s*+\w*+\s*+){0,2}+")
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call up to its arguments, where the name comes first."""
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
    """A tool's call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of the call under way: all of them are a JSON object, unless the answer was cut."""

    text: str


Part: TypeAlias = Thought | Said | Call | Arguments


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
        self._object = JsonObject()
        """The object under way: a call's arguments, or what is left of the call."""
        self._after_arguments: Callable[[bool], Part | bool] = self._said
        self._after: Callable[[bool], Part | bool] = self._said
        """What follows the call under way, as the one before what follows its arguments."""
        self._waiting: list[Part] = []
        """Parts that were found with the last one told."""
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
            found = self._waiting.pop(0) if self._waiting else self._read(is_end)
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
        if head := self._head():
            return self._call_begins(head, self._rest_of_call, self._hermes_end)
        text, mark, rest = self._text.partition(_HERMES_END)
        if not mark and not is_end:
            return False
        calls = self._calls(_decoded(text)[0])
        if len(calls) != 1:
            return self._no_call(text + mark, rest)
        self._begin(self._said, rest)
        return self._told(calls)

    def _hermes_end(self, is_end: bool) -> bool:
        _, mark, rest = self._text.partition(_HERMES_END)
        if not mark and not is_end:
            return False
        self._begin(self._said, rest)
        return True

    def _json(self, is_end: bool) -> Part | bool:
        """An object, as Llama 3 writes a call, with or without its mark."""
        if head := self._head():
            return self._call_begins(head, self._rest_of_call, self._between)
        begun = self._text.lstrip()
        value, length = _decoded(self._text) if begun.startswith("{") else (None, 0)
        if value is None and (not begun or begun.startswith("{")) and not is_end:
            return False
        calls = self._calls(value)
        if not calls:
            return self._no_call(self._text[:length], self._text[length:])
        self._begin(self._between, self._text[length:])
        return self._told(calls)

    def _between(self, is_end: bool) -> bool:
        """Another object may follow."""
        more = self._text.lstrip("; \n\t\r")
        if not more and not is_end:
            return False
        self._begin(self._json if more.startswith("{") else self._said, more)
        return True

    def _mistral(self, is_end: bool) -> Part | bool:
        """A list of calls, or a name before its arguments."""
        begun = self._text.lstrip()
        if begun.startswith("["):
            self._read, self._raw, self._text = self._list, self._raw + self._text[: -len(begun)] + "[", begun[1:]
            return True
        if not is_end and _NAMED_SO_FAR.fullmatch(self._text):
            return False
        named = _NAMED.match(self._text)
        if not named or named[1] not in self._tools:
            return self._no_call("", self._text)
        return self._call_begins(named, self._said, self._said)

    def _list(self, is_end: bool) -> Part | bool:
        """A call of a list, or all that are left where it does not begin with its name."""
        if head := self._head():
            return self._call_begins(head, self._rest_of_call, self._next_in_list)
        begun = self._text.lstrip()
        value, length = _decoded("[" + self._text)
        if value is None and (not begun or begun.startswith("{")) and not is_end:
            return False
        calls = self._calls(value)
        if not calls:
            return self._no_call("", self._text)
        self._begin(self._said, self._text[length - 1 :])
        return self._told(calls)

    def _next_in_list(self, is_end: bool) -> bool:
        """Another call, or the list's end."""
        more = self._text.lstrip()
        if not more and not is_end:
            return False
        is_last = not more.startswith(",")
        self._begin(self._said if is_last else self._list, more.removeprefix("]") if is_last else more[1:])
        return True

    def _head(self) -> re.Match[str] | None:
        """The beginning of a call of a tool that there is."""
        head = _HEAD.match(self._text)
        return head if head and head[1] in self._tools else None

    def _call_begins(
        self, head: re.Match[str], after_arguments: Callable[[bool], Part | bool], after: Callable[[bool], Part | bool]
    ) -> Part:
        self._begin(self._arguments, self._text[head.end() :])
        self._object, self._after_arguments, self._after = JsonObject(), after_arguments, after
        return Call(head[1])

    def _arguments(self, is_end: bool) -> Part | bool:
        """Arguments as they come."""
        length = self._object.read(self._text)
        text, self._text = self._text[:length], self._text[length:]
        if self._object.is_whole:
            self._object = JsonObject(depth=1)
            self._read = self._after_arguments
        return Arguments(text) if text else False

    def _rest_of_call(self, is_end: bool) -> bool:
        """Further keys, which say nothing, and the object's end."""
        self._text = self._text[self._object.read(self._text) :]
        if not self._object.is_whole and not is_end:
            return False
        self._begin(self._after, self._text)
        return True

    def _calls(self, value: Any) -> list[tuple[str, str]]:
        """Name and arguments of the calls that a value stands for; none where it stands for anything else."""
        calls = []
        for entry in value if isinstance(value, list) else [value]:
            if not isinstance(entry, dict) or entry.get("name") not in self._tools:
                return []
            arguments = entry.get("arguments", entry.get("parameters", {}))
            if not isinstance(arguments, dict):
                return []
            calls.append((entry["name"], json.dumps(arguments, ensure_ascii=False)))
        return calls

    def _told(self, calls: list[tuple[str, str]]) -> Part:
        """Whole calls, part by part."""
        self._waiting = [part for name, text in calls for part in (Call(name), Arguments(text))]
        return self._waiting.pop(0)

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
