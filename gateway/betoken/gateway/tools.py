"""Tools of a request, as the template is given them, and calls as OpenAI's clients are.

Does not know what models write: see `tool_calls`.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from pydantic import Field

from betoken.gateway.body import Body
from betoken.gateway.tool_calls.parts import Call

MAX_TOOLS = 1024
_ID_DIGITS = 9  # what Mistral's templates ask of ids


class Function(Body):
    """A function that may be called."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[\w.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(False, description="Whether a grammar keeps calls of it to its parameters.")


class Tool(Body):
    """One tool."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The text unchanged."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


def call_object(call: Call, request_id: str, choice: int, index: int) -> dict[str, Any]:
    """`message.tool_calls[index]`, without arguments so far; its id is the same however often the reply is written."""
    digest = hashlib.sha256(f"{request_id}:{choice}:{index}".encode()).hexdigest()
    return {"id": digest[:_ID_DIGITS], "type": "function", "function": {"name": call.name, "arguments": ""}}
