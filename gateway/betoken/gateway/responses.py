"""`/v1/responses`: its body, and the question in it. The server stores nothing: each request brings its whole
conversation.

Knows no answers: `responses_form` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from betoken.client import ChatMessage, ToolFormat
from betoken.gateway.body import (
    CACHE_BREAKPOINT,
    Body,
    GenerationBody,
    Many,
    Refusals,
    StreamOptions,
    refuse,
    said_as,
)
from betoken.gateway.constraint import format_constraint
from betoken.gateway.messages import MAX_MESSAGES, CalledFunction, ToolCall
from betoken.gateway.question import Question
from betoken.gateway.tool_choice import ToolChoice, calls_constraint, check_choice, tool_choice, why_constrained
from betoken.gateway.tools import MAX_TOOLS, Function

_FOREIGN_CALLS: Refusals = {
    "async": ("is not supported: a call has one result", (False,)),
    "caller": ("is not supported: the model alone calls", ()),
    "namespace": ("is not supported: tools are distinguished by name", ()),
}


class InputText(Body):
    """A part of a message; parts of earlier answers are unchanged."""

    refused: ClassVar[Refusals] = CACHE_BREAKPOINT
    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


Parts: TypeAlias = Annotated[str | Many[InputText], said_as("must be text, or a list of parts of text")]


class InputMessage(Body):
    """A message."""

    refused: ClassVar[Refusals] = {"phase": ("is not supported: no template knows it", ())}
    type: Literal["message"] = "message"
    role: str = Field(min_length=1)
    content: Parts
    id: str | None = None
    status: str | None = None


class InputCall(CalledFunction):
    """A call that was made."""

    refused: ClassVar[Refusals] = _FOREIGN_CALLS
    type: Literal["function_call"]
    call_id: str
    id: str | None = None
    status: str | None = None


class InputCallOutput(Body):
    """The result."""

    refused: ClassVar[Refusals] = {**_FOREIGN_CALLS, "name": ("is not supported: call_id names the call", ())}
    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: str | None = None


class InputReasoning(Body):
    """The thoughts before the assistant's next message."""

    refused: ClassVar[Refusals] = {"encrypted_content": ("is not supported", ())}
    type: Literal["reasoning"]
    content: Parts = ""
    summary: list[Any] = Field(default_factory=list, max_length=0)
    id: str | None = None
    status: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"<{kind or 'message'}>"


Item: TypeAlias = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[InputCall, Tag("<function_call>")]
    | Annotated[InputCallOutput, Tag("<function_call_output>")]
    | Annotated[InputReasoning, Tag("<reasoning>")],
    Discriminator(_kind, custom_error_type="item", custom_error_message="is of a type that is not supported"),
]


def _kind_of_input(value: Any) -> str | None:
    return "<text>" if isinstance(value, str) else "<items>" if isinstance(value, list) else None


Input: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("<text>")]
    | Annotated[Many[Item], Field(min_length=1, max_length=MAX_MESSAGES), Tag("<items>")],
    Discriminator(_kind_of_input, custom_error_type="input", custom_error_message="must be text or a list of items"),
]


class FlatTool(Function):
    """A function that may be called."""

    refused: ClassVar[Refusals] = {
        "allowed_callers": ("is not supported: the model alone calls", (["direct"],)),
        "async": ("is not supported: a call has one result", (False,)),
        "defer_loading": ("is not supported: the template is given all tools", (False,)),
        "output_schema": ("is not supported: results are taken as they are", ()),
    }
    type: Literal["function"]

    def for_template(self) -> dict[str, Any]:
        """The form that chats use."""
        return {"type": "function", "function": self.model_dump(exclude_unset=True, exclude={"type"})}


class TextOptions(Body):
    """Options of the answer's text."""

    refused: ClassVar[Refusals] = {"verbosity": ("is not supported: no template knows it", ("medium",))}
    format: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        format_constraint(value, is_flat=True)
        return value


class Reasoning(Body):
    """How much to think."""

    refused: ClassVar[Refusals] = {
        "summary": ("is not supported: reasoning is returned in full", ()),
        "generate_summary": ("is not supported: reasoning is returned in full", ()),
        "context": ("is not supported: the template is given all thoughts", ("all_turns",)),
        "mode": ("is not supported: a template knows efforts", ("standard",)),
    }
    effort: str | None = None


class ResponsesBody(GenerationBody):
    """Fields of a request."""

    refused: ClassVar[Refusals] = {
        "previous_response_id": ("is not supported: nothing is stored", ()),
        "conversation": ("is not supported: nothing is stored", ()),
        "prompt": ("is not supported: nothing is stored", ()),
        "store": ("is not supported: nothing is stored", (False,)),
        "background": ("is not supported: nothing is stored", (False,)),
        "background_options": ("is not supported: nothing is stored", ()),
        "access_programs": ("is not supported", ()),
        "context_management": ("is not supported: a conversation is taken whole", ([],)),
        "image": ("is not supported: answers are text", ()),
        "moderation": ("is not supported: nothing is moderated", ()),
        "metadata": ("is not supported: nothing is stored", ({},)),
        "include": ("is not supported", ([],)),
        "truncation": ("must be disabled", ("disabled",)),
        "max_tool_calls": ("is not supported: no tools are called here", ()),
        "service_tier": ("must be auto or default", ("auto", "default")),
        "top_logprobs": ("is not supported", (0,)),
        "prompt_cache_options": ("is not supported: prompts are found by their tokens", ()),
        "prompt_cache_key": ("is not supported: prompts are found by their tokens", ()),
        "prompt_cache_retention": ("is not supported: what is kept depends on room", ()),
        "safety_identifier": ("is not supported: send user", ()),
        "n": ("must be 1", (1,)),
    }
    stream_options: StreamOptions | None = None
    input: Input = Field(description="A user's text, or the whole conversation.")
    instructions: str | None = Field(None, description="A system message before it.")
    max_output_tokens: int | None = None
    tools: Many[FlatTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Annotated[str | dict[str, Any], said_as("must be text or an object")] = "auto"
    parallel_tool_calls: bool = Field(True, description="Whether an answer may make several calls.")
    text: TextOptions | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponsesBody:
        if self.include_usage:
            raise refuse("stream_options.include_usage", "is not known here: the last event has the usage")
        if self.betoken.add_special_tokens is not None:
            raise refuse("betoken.add_special_tokens", "is of completions: a template writes its own")
        check_choice(self.tool_choice, self.tools or ())
        if self.why_constrained and (self._constraint is not None):
            raise refuse(self.why_constrained, "is kept by a constraint, too, and one answer has one")
        if self.betoken.constraint is not None and self._format is not None:
            raise refuse("text.format", "is a constraint, too, together with betoken.constraint")
        return self

    @property
    def _format(self) -> dict[str, Any] | None:
        return self.text.format if self.text is not None else None

    @property
    def callable_tools(self) -> list[FlatTool]:
        """Callable tools; the model also sees the others, unless none is callable."""
        names = {tool.name for tool in self._choice.among(self.tools or ())}
        return [tool for tool in self.tools or () if tool.name in names]

    @property
    def _choice(self) -> ToolChoice:
        return tool_choice(self.tool_choice, [tool.name for tool in self.tools or ()])

    @property
    def why_constrained(self) -> str:
        """The field that requires a grammar for calls; empty if none is needed."""
        return why_constrained(self._choice, self.callable_tools, self.parallel_tool_calls)

    @property
    def must_call(self) -> bool:
        """Whether an answer is nothing but calls."""
        return self._choice.mode == "required"

    @property
    def _constraint(self) -> Mapping[str, Any] | None:
        return self.betoken.constraint if self._format is None else format_constraint(self._format, is_flat=True)

    def questions(self, form_of_calls: ToolFormat | None = None) -> list[Question]:
        """The constraint. `form_of_calls`: format of calls, if a grammar needs it."""
        constraint = self._constraint
        if why := self.why_constrained:
            form_of_calls = form_of_calls or ToolFormat("", {})
            constraint = calls_constraint(
                self._choice, self.callable_tools, form_of_calls, is_parallel=self.parallel_tool_calls, why=why
            )
        effort, form = self.reasoning.effort if self.reasoning is not None else None, self._format
        return [
            Question(
                self._messages(),
                seed=self.first_seed(),
                sampling=self.sampling(max_new_tokens=self.max_output_tokens, logprobs=None),
                speculation=self.betoken.speculation(),
                model=self.model,
                tenant=self.user,
                names={
                    "sampling.max_new_tokens": "max_output_tokens",
                    "messages.template_arguments.reasoning_effort": "reasoning.effort",
                    "messages.tools": "tools",
                    "messages.messages": "input",
                    "messages": "input",
                }
                | ({"constraint.lark": "tools", "constraint": "tools"} if self.why_constrained else {})
                | ({"constraint.json_schema": "text.format.schema", "constraint": "text.format"} if form else {}),
                tools=[tool.for_template() for tool in self.tools or ()] if self.callable_tools else [],
                template_arguments={} if effort is None else {"reasoning_effort": effort},
                constraint=constraint,
                escape_special_tokens=bool(self.betoken.escape_special_tokens),
            )
        ]

    def _messages(self) -> list[ChatMessage]:
        """The form that templates take: an assistant's thoughts, text and calls are one message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for item in items:
            match item:
                case InputMessage():
                    role = "system" if item.role == "developer" else item.role
                    target = _assistant(messages) if role == "assistant" else _new(messages, role)
                    target["content"] += _joined(item.content)
                case InputCall():
                    function = {"name": item.name, "arguments": item.arguments}
                    call = ToolCall.model_validate({"id": item.call_id, "type": "function", "function": function})
                    _assistant(messages).setdefault("tool_calls", []).append(call.for_template())
                case InputCallOutput():
                    _new(messages, "tool").update(content=_joined(item.output), tool_call_id=item.call_id)
                case InputReasoning():
                    _assistant(messages)["reasoning_content"] = _joined(item.content)
        return cast(list[ChatMessage], messages)


def _new(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    messages.append({"role": role, "content": ""})
    return messages[-1]


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that is being put together."""
    is_under_way = bool(messages) and messages[-1]["role"] == "assistant"
    return messages[-1] if is_under_way else _new(messages, "assistant")


def _joined(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
