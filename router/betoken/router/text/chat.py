"""A chat as a template is given it, out of a client's message.

Knows the form of the message; no template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from betoken.common.errors import InvalidArgumentError
from betoken.v1.generation_pb2 import ChatMessages

_OWN_KEYS = ("role", "content")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages, and a template's other inputs."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
    """The answer goes on with the last message."""
    num_bytes: int = 0
    """UTF-8 of all its texts."""
    escapes: bool = False
    """Names of special tokens in messages are text."""


def chat_of(given: ChatMessages) -> Chat:
    """The chat of a message.

    Raises:
        InvalidArgumentError: a text that is to be a JSON object is none, or a key is given twice.
    """
    messages = []
    for index, message in enumerate(given.messages):
        name = f"messages.messages[{index}].extra"
        extra = _object(name, message.extra)
        for key in _OWN_KEYS:
            if key in extra:
                raise InvalidArgumentError(name, key, "must not be among the further keys")
        messages.append({"role": message.role, "content": message.content} | extra)
    tools = [_object(f"messages.tools[{index}]", tool) for index, tool in enumerate(given.tools)]
    arguments = _object("messages.template_arguments", given.template_arguments)
    return Chat(messages, tools, arguments, given.continue_final_message, given.ByteSize(), given.escape_special_tokens)


def _object(name: str, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidArgumentError(name, text, "must be a JSON object")
    return value
