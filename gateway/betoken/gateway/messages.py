"""Messages of a chat as OpenAI's clients send them, and as the model's template is given them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from betoken.client import ChatMessage
from betoken.gateway.body import Body, Refusals, said_as


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content: TypeAlias = Annotated[str | list[TextPart], said_as("must be text, or a list of parts of type text")]


class Message(Body):
    """One message."""

    refused: ClassVar[Refusals] = {
        "name": ("is not supported yet", ()),
        "tool_calls": ("is not supported yet", ([],)),
        "tool_call_id": ("is not supported yet", ()),
        "function_call": ("is not supported", ()),
        "refusal": ("is not supported", ()),
        "audio": ("is not supported", ()),
        "annotations": ("is not supported", ([],)),
    }
    role: str = Field(min_length=1, description="developer (a system's), system, user, assistant, ...")
    content: Content

    def for_template(self) -> ChatMessage:
        """For the model's template, which knows no developers and no parts."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}
