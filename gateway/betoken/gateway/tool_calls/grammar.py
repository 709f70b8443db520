"""A grammar of the calls that an answer must or may make, in the format of the model's template.

Knows llguidance's variant of Lark; nothing of requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betoken.client import ToolFormat
from betoken.gateway.tool_calls.tagged_calls import GLM, HUNYUAN, MINIMAX, QWEN3_CODER, SEED_OSS, Tags
from betoken.gateway.tool_calls.tagged_grammar import WHITESPACE, TaggedArguments

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as a grammar sees it."""

    name: str
    schema: Mapping[str, Any] | None
    """Schema of its arguments; None = any object."""


@dataclass(frozen=True, slots=True)
class CallLayout:
    """Texts around calls: `begin before NAME middle ARGUMENTS after`, again for the next call, and then `end`."""

    begin: tuple[str, ...]
    before: tuple[str, ...]
    middle: tuple[str, ...]
    after: tuple[str, ...]
    separator: str = ""
    """Text between calls."""
    end: tuple[str, ...] | None = None
    """None = each call begins with `begin`."""
    tags: Tags | None = None
    """Tags of arguments that are not JSON."""
    is_single: bool = False
    """Whether there is at most one call in any case."""
    is_only_required: bool = False
    """Whether only answers that must call can be constrained: other answers are messages with special tokens."""


def _json(begin: tuple[str, ...], end: tuple[str, ...], key: str = "arguments") -> CallLayout:
    return CallLayout(begin, ('{"name": "',), (f'", "{key}": ',), ("}",), ", ", end)


def _tagged(tags: Tags) -> CallLayout:
    if not tags.call:
        return CallLayout((tags.opening,), (), ("\n",), (tags.closing,), "\n", None, tags)
    after = (tags.end, "\n", tags.closing)
    return CallLayout((tags.opening,), ("\n", tags.call), (">\n",), after, "\n", None, tags)


_FENCE = "\n```"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK = (("<｜tool▁calls▁begin｜>",), "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁end｜>",))
LAYOUTS = {
    "hermes": CallLayout(
        ("<tool_call>", "\n"), ('{"name": "',), ('", "arguments": ',), ("}", "\n", "</tool_call>"), "\n"
    ),
    "llama": CallLayout((), ('{"name": "',), ('", "parameters": ',), ("}",), is_single=True),
    "mistral": _json(("[TOOL_CALLS]", "["), ("]",)),
    "mistral_named": CallLayout(("[TOOL_CALLS]",), (), ("[ARGS]",), ()),
    "granite": _json(("<|tool_call|>", "["), ("]",)),
    "hunyuan": _json(("<tool_calls>", "["), ("]", "</tool_calls>")),
    "nemotron": _json(("<TOOLCALL>", "["), ("]", "</TOOLCALL>")),
    "phi4_mini": _json(("functools", "["), ("]",)),
    "deepseek_v3": CallLayout(
        _DEEPSEEK[0],
        (_DEEPSEEK_CALL, "function", _DEEPSEEK[1]),
        (_FENCE + "json\n",),
        (_FENCE, _DEEPSEEK[2]),
        "\n",
        _DEEPSEEK[3],
    ),
    "deepseek_v31": CallLayout(_DEEPSEEK[0], (_DEEPSEEK_CALL,), (_DEEPSEEK[1],), (_DEEPSEEK[2],), end=_DEEPSEEK[3]),
    "kimi_k2": CallLayout(
        ("<|tool_calls_section_begin|>",),
        ("<|tool_call_begin|>", "functions."),
        (":NUMBER", "<|tool_call_argument_begin|>"),
        ("<|tool_call_end|>",),
        end=("<|tool_calls_section_end|>",),
    ),
    "harmony": CallLayout(
        ("<|channel|>",),
        ("commentary to=functions.",),
        (" ", "<|constrain|>", "json", "<|message|>"),
        (),
        is_single=True,
        is_only_required=True,
    ),
    "qwen3_coder": _tagged(QWEN3_CODER),
    "seed_oss": _tagged(SEED_OSS),
    "glm45": _tagged(GLM),
    "hunyuan_v3": CallLayout(
        ("<tool_calls>",),
        ("\n", "<tool_call>"),
        ("<tool_sep>", "\n"),
        ("</tool_call>",),
        end=("\n", "</tool_calls>"),
        tags=HUNYUAN,
    ),
    "minimax_m2": CallLayout(
        ("<minimax:tool_call>",),
        ("\n", '<invoke name="'),
        ('">\n',),
        ("</invoke>",),
        end=("\n", "</minimax:tool_call>"),
        tags=MINIMAX,
    ),
}
"""Formats whose calls a grammar can enforce."""


def call_grammar(form: ToolFormat, tools: Sequence[CallableTool], *, is_required: bool, is_parallel: bool) -> str:
    """Return the grammar, as Lark.

    Args:
        form: a format in `LAYOUTS`, and the ids of marks that are special tokens.
        tools: at least one.
        is_required: there is nothing but calls; otherwise text may precede them, or be alone.
        is_parallel: there may be several.

    Raises:
        UnsupportedSchemaError: a schema that the format cannot keep to.
    """
    rules = _Rules(form, tools)
    layout = LAYOUTS[form.name]
    is_parallel = is_parallel and not layout.is_single
    begin, *rest = layout.begin or ("",)
    call = [*rules.texts(layout.before), "call", *rules.texts(layout.after)]
    between = rules.texts((layout.separator,))
    if layout.end is None:
        body = " ".join([*rules.texts(rest), *call])
        again = " ".join([*between, *rules.texts((begin,)), body])
        required, repeated = body, "+" if is_parallel and begin else ""
    else:
        again = " ".join([*between, *call])
        more = f"({again})*" if is_parallel else ""
        required = body = " ".join([*rules.texts(rest), *call, more, *rules.texts(layout.end)])
        repeated = ""
    if is_required:
        more = f" ({again})*" if layout.end is None and is_parallel else ""
        lines = ["start: " + " ".join([*rules.texts((begin,)), required]) + more]
    else:
        lines = rules.after_text(begin, body, repeated)
    return "\n".join([*lines, *rules.calls(layout)]) + "\n"


class _Rules:
    """Parts of one grammar."""

    def __init__(self, form: ToolFormat, tools: Sequence[CallableTool]) -> None:
        self._form = form
        self._tools = tools

    def mark(self, name: str) -> str:
        """Lark of a mark: its special token, if it is one, or its text."""
        token_id = self._form.mark_ids.get(name)
        return json.dumps(name, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def texts(self, texts: Sequence[str]) -> list[str]:
        """Texts and marks."""
        return ['":" /[0-9]{1,3}/' if text == ":NUMBER" else self.mark(text) for text in texts if text]

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

    def calls(self, layout: CallLayout) -> list[str]:
        """One call of any of the tools."""
        lines = ["call: " + " | ".join(f"call_{index}" for index in range(len(self._tools)))]
        for index, tool in enumerate(self._tools):
            quoted = json.dumps(tool.name, ensure_ascii=False)
            rule = f"arguments_{index}"
            lines.append(f"call_{index}: " + " ".join([quoted, *self.texts(layout.middle), rule]))
            if layout.tags is not None:
                lines += TaggedArguments(layout.tags, self.mark, rule, tool.name).rules(tool.schema)
            else:
                lines.append(f"{rule}: %json {json.dumps(guided(tool.schema or _ANY_OBJECT))}")
        return lines


def guided(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with bounded white space."""
    return schema if "x-guidance" in schema else {**schema, "x-guidance": WHITESPACE}
