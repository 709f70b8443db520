"""Renders chat messages through a model's Jinja template, in the sandbox and dialect that transformers uses.

A template is somebody else's program: it runs sandboxed, and whatever it raises is the request's fault, not ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from betoken.common.errors import InvalidArgumentError

MAX_RENDERED_CHARS = 1 << 26


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks the assistant's part for training and prints its body.

    What the body sets ends with it, as in transformers.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class ChatTemplate:
    """A compiled chat template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text, ending where the assistant's answer begins.

        Raises:
            InvalidArgumentError: the template refuses these messages.
        """
        try:
            text = self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # templates raise what they like
            roles = [message.get("role", "") for message in messages]
            raise InvalidArgumentError("messages", roles, f"refused by the model's chat template: {error}") from error
        if len(text) > MAX_RENDERED_CHARS:
            raise InvalidArgumentError(
                "messages", len(text), f"rendered text must be at most {MAX_RENDERED_CHARS} characters"
            )
        return text

    @staticmethod
    def missing() -> InvalidArgumentError:
        """The error for chat messages to a model that has no template."""
        return InvalidArgumentError("messages", "set", "the model has no chat template; send text or token ids")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
