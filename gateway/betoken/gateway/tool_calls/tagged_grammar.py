"""Grammar rules of arguments with a pair of tags each: strings are raw text, other values are JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from betoken.gateway.tool_calls.tagged_calls import Tags
from betoken.gateway.tool_calls.values import types_of

_KNOWN = {"type", "properties", "required", "additionalProperties", "title", "description", "$defs", "definitions"}
_KNOWN |= {"$schema", "x-guidance", "maxProperties", "default"}
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
WHITESPACE = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
"""White space between JSON's tokens: what pretty printers write, a space or a line end and an indent."""


class UnsupportedSchemaError(ValueError):
    """A schema that calls in the model's format cannot be constrained to."""


class TaggedArguments:
    """Rules of one tool's arguments."""

    def __init__(self, tags: Tags, mark: Callable[[str], str], rule: str, tool: str) -> None:
        """`mark` writes a mark in Lark; `rule` is the name of the rule to define."""
        self._tags = tags
        self._mark = mark
        self._rule = rule
        self._tool = tool

    def rules(self, schema: Mapping[str, Any] | None) -> list[str]:
        """The rules.

        Raises:
            UnsupportedSchemaError: keywords that cannot be kept to.
        """
        if schema is None:
            return self._any()
        if unknown := sorted(set(schema) - _KNOWN):
            raise UnsupportedSchemaError(f"{self._tool}: {unknown[0]} at the top of parameters cannot be enforced")
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        lines, pairs = [], []
        for index, (key, value) in enumerate(properties.items()):
            name = f"{self._rule}_{index}"
            pairs.append(name if key in required else f"{name}?")
            lines += self._pair(name, key, value, definitions)
        return [f"{self._rule}: " + (" ".join(pairs) or '""'), *lines]

    def _pair(self, name: str, key: str, schema: Any, definitions: Mapping[str, Any]) -> list[str]:
        tags = self._tags
        edge = "\n" if tags.trims_lines else ""
        quote = '"' if tags.key.endswith('"') else ""
        head = [tags.key, key + quote + ("" if tags.value else tags.key_end + edge)]
        head += [tags.key_end, "\n", tags.value] if tags.value else []
        begin = " ".join(self._mark(text) for text in head if text)
        end = " ".join(self._mark(text) for text in (edge, tags.value_end, "\n") if text)
        options = schema.get("enum") if isinstance(schema, Mapping) else None
        if isinstance(options, list) and options and all(isinstance(each, str) for each in options):
            return [f"{name}: {begin} ({' | '.join(json.dumps(each) for each in options)}) {end}"]
        if "string" in types_of(schema):
            return self._string(name, key, schema, begin)
        if not isinstance(schema, Mapping):
            schema = {}
        text = json.dumps({**schema, **definitions, "x-guidance": WHITESPACE})
        return [f"{name}: {begin} {name}_value {end}", f"{name}_value: %json {text}"]

    def _string(self, name: str, key: str, schema: Mapping[str, Any], begin: str) -> list[str]:
        """A raw text. Unless its end tag is a special token, it ends with the first one."""
        if found := [keyword for keyword in _OF_STRINGS if keyword in schema]:
            raise UnsupportedSchemaError(f"{self._tool}: {found[0]} of {key} cannot be enforced")
        end, text = self._mark(self._tags.value_end), f"{name.upper()}_TEXT"
        if end.startswith("<["):
            return [f'{name}: {begin} {text}? {end} "\\n"', rf"{text}: /(.|\n)+/"]
        lines = [f'{name}: {begin} {name}_value "\\n"', f"{name}_value[lazy]: {text} {end}"]
        return [*lines, rf"{text}: /(.|\n)*/"]

    def _any(self) -> list[str]:
        """Any arguments."""
        tags, key = self._tags, f"{self._rule.upper()}_KEY"
        middle = [tags.key_end, "\n", tags.value] if tags.value else ['"' * tags.key.endswith('"') + tags.key_end]
        begin = " ".join([self._mark(tags.key), key, *(self._mark(text) for text in middle)])
        pair = self._string(f"{self._rule}_pair", "", {}, begin)
        return [f"{self._rule}: {self._rule}_pair*", *pair, rf"{key}: /[a-zA-Z0-9_.-]{{1,64}}/"]
