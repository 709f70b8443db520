"""Values of arguments that a model writes outside JSON: text of a schema's type, Python literals, Gemma's literals.

Reads with an index and a bounded depth, in time proportional to the text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 64
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_SCALAR = frozenset("+-._")


def to_json(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def parsed_json(text: str) -> tuple[Any, bool]:
    """The value of a JSON text, and whether it is one."""
    try:
        return json.loads(text, parse_constant=_refuse), True
    except (ValueError, RecursionError):
        return None, False


def types_of(schema: Any) -> frozenset[str]:
    """JSON types that a schema allows at its top level; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(each for each in kind if isinstance(each, str))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return frozenset[str]().union(*(types_of(each) for each in schema[key]))
    options = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[k] for k in ("const",) if k in schema]
    return frozenset("string" if isinstance(each, str) else "other" for each in options)


def value_of_text(text: str, schema: Any) -> str:
    """A raw text as JSON: a string if the schema allows only strings or if it is not JSON, otherwise its JSON value."""
    types = types_of(schema)
    if types == {"string"}:
        return to_json(text)
    value, is_json = parsed_json(text.strip())
    if not is_json or ("string" in types and value is not None and isinstance(value, str)):
        return to_json(text)
    if "string" in types and value is not None and not _has_type(value, types):
        return to_json(text)
    return to_json(value)


def _has_type(value: Any, types: frozenset[str]) -> bool:
    match value:
        case bool():
            return "boolean" in types
        case int() | float():
            return bool(types & {"number", "integer"})
        case list():
            return "array" in types
        case _:
            return isinstance(value, dict) and "object" in types


def _refuse(name: str) -> Any:
    raise ValueError(name)


class LiteralReader:
    """Reads literals from one text: strings in any of `quotes`, numbers, constants, lists and objects."""

    def __init__(self, text: str, quotes: tuple[str, ...], *, has_escapes: bool) -> None:
        self._text = text
        self._quotes = quotes
        self._has_escapes = has_escapes
        self._at = 0

    @property
    def has_ended(self) -> bool:
        """Whether only white space is left."""
        self._spaces()
        return self._at == len(self._text)

    def takes(self, literal: str) -> bool:
        """Read white space and `literal`, if it follows."""
        self._spaces()
        is_next = self._text.startswith(literal, self._at)
        self._at += len(literal) * is_next
        return is_next

    def name(self) -> str:
        """Read a bare name.

        Raises:
            ValueError: none follows.
        """
        self._spaces()
        start = self._at
        while self._at < len(self._text) and (self._text[self._at].isalnum() or self._text[self._at] in "._-"):
            self._at += 1
        if start == self._at:
            raise ValueError("no name")
        return self._text[start : self._at]

    def pairs(self, equals: str, end: str) -> dict[str, Any]:
        """Read pairs of names and values up to `end`.

        Raises:
            ValueError: no such pairs follow.
        """
        pairs: dict[str, Any] = {}
        while not self.takes(end):
            if pairs and not self.takes(","):
                raise ValueError("no comma")
            if self.takes(end):
                break
            key = self._key()
            if not self.takes(equals):
                raise ValueError("no value")
            pairs[key] = self.value()
        return pairs

    def value(self, depth: int = 0) -> Any:
        """Read a value.

        Raises:
            ValueError: none follows, or it is nested too deeply.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self.takes("{"):
            return self._object(depth)
        for begin, end in (("[", "]"), ("(", ")")):
            if self.takes(begin):
                return self._list(end, depth)
        text = self._string()
        return self._scalar() if text is None else text

    def _key(self) -> str:
        text = self._string()
        return self.name() if text is None else text

    def _object(self, depth: int) -> dict[str, Any]:
        value: dict[str, Any] = {}
        while not self.takes("}"):
            if value and not self.takes(","):
                raise ValueError("no comma")
            if self.takes("}"):
                break
            key = self._key()
            if not self.takes(":"):
                raise ValueError("no colon")
            value[key] = self.value(depth + 1)
        return value

    def _list(self, end: str, depth: int) -> list[Any]:
        value: list[Any] = []
        while not self.takes(end):
            if value and not self.takes(","):
                raise ValueError("no comma")
            if self.takes(end):
                break
            value.append(self.value(depth + 1))
        return value

    def _string(self) -> str | None:
        self._spaces()
        for quote in self._quotes:
            if self.takes(quote):
                return self._until(quote)
        return None

    def _until(self, quote: str) -> str:
        pieces: list[str] = []
        while True:
            end = self._text.find(quote, self._at)
            if end < 0:
                raise ValueError("a string without its end")
            escape = self._text.find("\\", self._at, end) if self._has_escapes else -1
            if escape < 0:
                pieces.append(self._text[self._at : end])
                self._at = end + len(quote)
                return "".join(pieces)
            pieces.append(self._text[self._at : escape])
            pieces.append(self._escaped(self._text[escape + 1 : escape + 2]))
            self._at = escape + 2
            if pieces[-1] == "\\u":
                pieces[-1] = chr(int(self._text[self._at : self._at + 4], 16))
                self._at += 4

    @staticmethod
    def _escaped(character: str) -> str:
        if character in ("\\", "'", '"', "/"):
            return character
        return _ESCAPES.get(character, "\\" + character)

    def _scalar(self) -> Any:
        start = self._at
        while self._at < len(self._text) and (self._text[self._at].isalnum() or self._text[self._at] in _SCALAR):
            self._at += 1
        word = self._text[start : self._at]
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        value, is_json = parsed_json(word)
        if not is_json:
            raise ValueError("no value")
        return value

    def _spaces(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
