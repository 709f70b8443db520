"""A grammar of the calls that an answer has to make, or may make, in the way the model's template writes them.

Knows the forms of Hermes and Qwen, Llama 3 and Mistral, and llguidance's variant of Lark; nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betoken.client import ToolFormat

FORMATS = ("hermes", "llama", "mistral", "mistral_named")
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_WHITESPACE = {"whitespace_pattern": r" |\n( {0,40}|\t{0,10})"}
"""White space between JSON's tokens: what pretty printers write, a space or a line end and an indent."""


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as a grammar sees it."""

    name: str
    schema: Mapping[str, Any] | None
    """Schema of its arguments; None = any object."""


def call_grammar(form: ToolFormat, tools: Sequence[CallableTool], *, is_required: bool, is_parallel: bool) -> str:
    """The grammar, as Lark.

    Args:
        form: one of `FORMATS`, and the ids of marks that are special tokens.
        tools: at least one.
        is_required: there is nothing but calls; otherwise text may stand before them, or alone.
        is_parallel: there may be several.
    """
    rules = _Rules(form, tools)
    repeated = "+" if is_parallel else ""
    match form.name:
        case "hermes":
            body = f'"\\n" call "\\n" {rules.mark("</tool_call>")}'
            calls = f"{rules.mark('<tool_call>')} {body}"
            more = f' ("\\n" {calls})*' if is_parallel else ""
            start, begin = f"{calls}{more}", "<tool_call>"
        case "llama":
            start = body = "call"
            begin = ""
        case "mistral":
            body = '" "? "[" call ' + ('("," " "? call)* ' if is_parallel else "") + '"]"'
            start, begin, repeated = f"{rules.mark('[TOOL_CALLS]')} {body}", "[TOOL_CALLS]", ""
        case _:
            body = "call"
            start, begin = f"({rules.mark('[TOOL_CALLS]')} call){repeated}", "[TOOL_CALLS]"
    lines = [f"start: {start}"] if is_required else rules.after_text(begin, body, repeated)
    return "\n".join([*lines, *rules.calls()]) + "\n"


class _Rules:
    """Parts of one grammar."""

    def __init__(self, form: ToolFormat, tools: Sequence[CallableTool]) -> None:
        self._form = form
        self._tools = tools

    def mark(self, name: str) -> str:
        """A mark: a special token, which is no text, or else its text."""
        token_id = self._form.mark_ids.get(name)
        return json.dumps(name) if token_id is None else f"<[{token_id}]>"

    def after_text(self, begin: str, body: str, repeated: str) -> list[str]:
        """Text alone, or before calls that `begin` begins; without such a mark, text that begins unlike a call."""
        if not begin:
            return [f"start: {body} | TEXT?", r"TEXT: /[^{ \t\r\n](.|\n)*/"]
        if begin in self._form.mark_ids:
            return [f"start: (TEXT? {self.mark(begin)} {body}){repeated} | TEXT?", r"TEXT: /(.|\n)+/"]
        # A lazy match ends with the first mark, so that free text holds none.
        return [
            f"start: (before {body}){repeated} | TEXT?",
            f"before[lazy]: TEXT_BEFORE {self.mark(begin)}",
            r"TEXT_BEFORE: /(.|\n)*/",
            r"TEXT: /(.|\n)+/",
        ]

    def calls(self) -> list[str]:
        """One call of any of the tools."""
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            schema = json.dumps(_guided(tool.schema or _ANY_OBJECT))
            lines += [
                f"call_{index}: {self._one(tool.name, f'arguments_{index}')}",
                f"arguments_{index}: %json {schema}",
            ]
        return lines

    def _one(self, name: str, arguments: str) -> str:
        quoted = json.dumps(name)
        match self._form.name:
            case "mistral_named":
                return f"{quoted} {self.mark('[ARGS]')} {arguments}"
            case "llama":
                key = "parameters"
            case _:
                key = "arguments"
        begin = json.dumps(f'{{"name": {quoted}, "{key}": ')
        return f'{begin} {arguments} "}}"'


def _guided(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema if "x-guidance" in schema else {**schema, "x-guidance": _WHITESPACE}
