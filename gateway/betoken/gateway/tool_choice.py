"""Callable and required tools by `tool_choice`, and the grammar that enforces them if needed.

Knows a request's fields; what a call looks like is `tool_calls`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betoken.client import ToolFormat
from betoken.gateway.body import refuse
from betoken.gateway.errors import RefusedError
from betoken.gateway.tool_calls.grammar import LAYOUTS, CallableTool, call_grammar
from betoken.gateway.tool_calls.tagged_grammar import UnsupportedSchemaError
from betoken.gateway.tools import Function

MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The choice."""

    mode: str
    """One of `MODES`."""
    names: frozenset[str] | None = None
    """Tools that may be called; None = all."""

    def among(self, tools: Sequence[Function]) -> list[Function]:
        """Tools that may be called."""
        if self.mode == "none":
            return []
        return [tool for tool in tools if self.names is None or tool.name in self.names]


def tool_choice(given: str | Mapping[str, Any], names: Sequence[str]) -> ToolChoice:
    """The choice among tools of these names.

    Raises:
        ValueError: no choice of OpenAI's, or one of a tool that there is not.
    """
    match given:
        case str() if given in MODES:
            choice = ToolChoice(given)
        case {"type": "function", "function": {"name": str(name), **rest}, **more} if not rest and not more:
            choice = ToolChoice("required", frozenset((name,)))
        case {"type": "function", "name": str(name), **more} if not more:  # as responses have it
            choice = ToolChoice("required", frozenset((name,)))
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools], **rest}, **more} if not (
            rest or more
        ):
            choice = _allowed(mode, tools)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools], **more} if not more:
            choice = _allowed(mode, tools)
        case _:
            raise ValueError("must be none, auto, required, a function by its name, or allowed_tools")
    if unknown := sorted((choice.names or frozenset()) - set(names)):
        raise ValueError(f"names the tool {unknown[0]!r}, which is not among tools")
    if choice.mode == "required" and not names:
        raise ValueError("needs tools")
    return choice


def check_choice(given: str | Mapping[str, Any], tools: Sequence[Function]) -> None:
    """Raises:
    PydanticCustomError: no choice of OpenAI's, or of a tool that there is not.
    """
    try:
        tool_choice(given, [tool.name for tool in tools])
    except ValueError as error:
        raise refuse("tool_choice", str(error)) from None


def calls_constraint(
    choice: ToolChoice, tools: Sequence[Function], form: ToolFormat, *, is_parallel: bool, why: str
) -> Mapping[str, str]:
    """The constraint that keeps an answer to the choice.

    `why`: the field that asks for it.

    Raises:
        RefusedError: no grammar is known for the template's format, or it cannot enforce a schema.
    """
    is_required = choice.mode == "required"
    if form.name not in LAYOUTS or (LAYOUTS[form.name].is_only_required and not is_required):
        raise RefusedError(why, f"{why}: tool calls in the model's format {form.name!r} cannot be constrained")
    callables = [CallableTool(tool.name, tool.parameters if is_required or tool.strict else None) for tool in tools]
    try:
        grammar = call_grammar(form, callables, is_required=is_required, is_parallel=is_parallel)
    except UnsupportedSchemaError as error:
        raise RefusedError("tools", f"tools: {error} in the model's format {form.name!r} of tool calls") from None
    return {"lark": grammar}


def why_constrained(choice: ToolChoice, tools: Sequence[Function], is_parallel: bool) -> str:
    """The field that needs a grammar; empty where calls are free."""
    if choice.mode == "required":
        return "tool_choice"
    if not tools:
        return ""
    if not is_parallel:
        return "parallel_tool_calls"
    return "tools" if any(tool.strict for tool in tools) else ""


def _allowed(mode: Any, tools: Sequence[Any]) -> ToolChoice:
    names = []
    for tool in tools:
        match tool:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                names.append(name)
            case _:
                raise ValueError("allowed_tools: each must be a function by its name")
    if mode not in ("auto", "required") or not names:
        raise ValueError("allowed_tools: needs a mode, auto or required, and at least one tool")
    return ToolChoice(mode, frozenset(names))
