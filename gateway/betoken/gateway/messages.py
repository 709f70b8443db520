"""Messages of a chat as OpenAI's clients send them, and as the model's template is given them."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Field, field_validator, model_validator

from betoken.client import ChatMessage
from betoken.gateway.body import CACHE_BREAKPOINT, Body, Many, Refusals, refuse, said_as

MAX_MESSAGES = 16384


class TextPart(Body):
    """A part of a message."""

    refused: ClassVar[Refusals] = CACHE_BREAKPOINT
    type: Literal["text"]
    text: str


Content: TypeAlias = Annotated[str | Many[TextPart], said_as("must be text, or a list of parts of type text")]


class CalledFunction(Body):
    """An assistant's calls."""

    name: str = Field(min_length=1)
    arguments: str = Field(description="A JSON object, as text.")

    @field_validator("arguments")
    @classmethod
    def _check(cls, text: str) -> str:
        if not isinstance(_object(text), dict):
            raise ValueError("must be a JSON object, as text")
        return text


class ToolCall(Body):
    """One call of an assistant."""

    id: str
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With its arguments as the object that templates expect."""
        function = {"name": self.function.name, "arguments": _object(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    """One message."""

    refused: ClassVar[Refusals] = {
        "function_call": ("is deprecated and not supported: send tool_calls", ()),
        "refusal": ("is not supported", ("",)),
        "audio": ("is not supported", ()),
        "annotations": ("is not supported", ([],)),
    }
    role: str = Field(min_length=1, description="developer (a system's), system, user, assistant, tool, ...")
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise refuse("content", "must be there")
        return self

    def for_template(self) -> ChatMessage:
        """For the model's template, which knows no developers and no parts."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        further: dict[str, Any] = {
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls] if self.tool_calls else None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        role = "system" if self.role == "developer" else self.role
        given = {"role": role, "content": content or ""}
        return cast(ChatMessage, given | {name: value for name, value in further.items() if value is not None})


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
