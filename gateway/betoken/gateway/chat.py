"""`/v1/chat/completions`: its body, and the questions in it.

Knows no answers: `chat_form` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from betoken.client import ToolFormat
from betoken.gateway.body import GenerationBody, Many, Prediction, Refusals, refuse, said_as
from betoken.gateway.constraint import format_constraint
from betoken.gateway.messages import MAX_MESSAGES, Message
from betoken.gateway.question import Question
from betoken.gateway.tool_choice import ToolChoice, calls_constraint, check_choice, tool_choice, why_constrained
from betoken.gateway.tools import MAX_TOOLS, Tool

MAX_TOP_LOGPROBS = 20
_EFFORT = "reasoning_effort"


class ChatBody(GenerationBody):
    """The fields of a request."""

    refused: ClassVar[Refusals] = {
        "audio": ("is not supported: answers are text", ()),
        "modalities": ("must be text alone", (["text"],)),
        "prompt_logprobs": ("is not supported: completions have echo with logprobs", ()),
        "functions": ("is deprecated and not supported: send tools", ([],)),
        "function_call": ("is deprecated and not supported: send tool_choice", ("none",)),
        "web_search_options": ("is not supported: nothing is looked up", ()),
        "metadata": ("is not supported: nothing is stored", ({},)),
        "store": ("is not supported: nothing is stored", (False,)),
        "service_tier": ("must be auto or default", ("auto", "default")),
        "verbosity": ("is not supported: no template knows it", ("medium",)),
        "moderation": ("is not supported: nothing is moderated", ()),
        "prompt_cache_options": ("is not supported: prompts are found by their tokens", ()),
        "prompt_cache_key": ("is not supported: prompts are found by their tokens", ()),
        "prompt_cache_retention": ("is not supported: what is kept depends on room", ()),
        "safety_identifier": ("is not supported: send user", ()),
    }
    messages: Many[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, description="Most tokens of an answer; absent = what fits, at most 1024.")
    max_completion_tokens: int | None = Field(None, description="The same by its newer name.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    prediction: Prediction | None = Field(None, description="Drafted from; changes no token.")
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, or json_schema, whose schema the answer keeps, strict or not."
    )
    tools: Many[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Given to the model's template.")
    tool_choice: Annotated[str | dict[str, Any], said_as("must be text or an object")] = Field(
        "auto", description="none, auto, required, a function by its name, or allowed_tools."
    )
    parallel_tool_calls: bool = Field(True, description="Whether an answer may make several calls.")
    reasoning_effort: str | None = Field(None, description="Passed to the model's template, if it supports it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Further variables for that template.")
    continue_final_message: bool = Field(False, description="Whether the answer goes on with the last message.")

    @field_validator("response_format")
    @classmethod
    def _check_format(cls, value: dict[str, Any]) -> dict[str, Any]:
        format_constraint(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "needs logprobs: true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise refuse("max_completion_tokens", "is the newer name of max_tokens, which says something else")
        if self.betoken.constraint is not None and self.response_format is not None:
            raise refuse("response_format", "is a constraint, too, together with betoken.constraint")
        check_choice(self.tool_choice, [tool.function for tool in self.tools or ()])
        if self.why_constrained and (self.response_format is not None or self.betoken.constraint is not None):
            raise refuse(self.why_constrained, "is kept by a constraint, too, and one answer has one")
        if self.betoken.add_special_tokens is not None:
            raise refuse("betoken.add_special_tokens", "is of completions: a template writes its own")
        if _EFFORT in (self.chat_template_kwargs or {}) and self.reasoning_effort is not None:
            raise refuse(_EFFORT, "is among the chat_template_kwargs, too")
        return self

    @property
    def callable_tools(self) -> list[Tool]:
        """Callable tools; the model also sees the others, unless none is callable."""
        names = {tool.name for tool in self._choice.among([tool.function for tool in self.tools or ()])}
        return [tool for tool in self.tools or () if tool.function.name in names]

    @property
    def _choice(self) -> ToolChoice:
        return tool_choice(self.tool_choice, [tool.function.name for tool in self.tools or ()])

    @property
    def why_constrained(self) -> str:
        """The field that requires a grammar for calls; empty if none is needed."""
        return why_constrained(self._choice, [tool.function for tool in self.callable_tools], self.parallel_tool_calls)

    @property
    def must_call(self) -> bool:
        """Whether an answer is nothing but calls."""
        return self._choice.mode == "required"

    def questions(self, form: ToolFormat | None = None) -> list[Question]:
        """The constraint. `form`: format of calls, if a grammar needs it."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        effort = {} if self.reasoning_effort is None else {_EFFORT: self.reasoning_effort}
        asked = Question(
            [message.for_template() for message in self.messages],
            seed=self.first_seed(),
            sampling=self.sampling(max_new_tokens=most, logprobs=logprobs),
            speculation=self.betoken.speculation(),
            model=self.model,
            tenant=self.user,
            names=self._names(),
            tools=[tool.for_template() for tool in self.tools or ()] if self.callable_tools else [],
            template_arguments=(self.chat_template_kwargs or {}) | effort,
            continue_final_message=self.continue_final_message,
            constraint=self._constraint(form),
            num_answers=self.n,
            escape_special_tokens=bool(self.betoken.escape_special_tokens),
            prediction=None if self.prediction is None else self.prediction.text,
        )
        return [asked]

    def _constraint(self, form: ToolFormat | None) -> Mapping[str, Any] | None:
        if why := self.why_constrained:
            functions = [tool.function for tool in self.callable_tools]
            form = form or ToolFormat("", {})
            return calls_constraint(self._choice, functions, form, is_parallel=self.parallel_tool_calls, why=why)
        return self.betoken.constraint if self.response_format is None else format_constraint(self.response_format)

    def _names(self) -> Mapping[str, str]:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        names = {"sampling.max_new_tokens": name, "sampling.logprobs": "top_logprobs"}
        if self.prediction is not None:
            names |= {"prediction.text": "prediction.content", "prediction": "prediction"}
        if self.why_constrained:
            names |= {"constraint.lark": "tools", "constraint": "tools"}
        if self.response_format is not None:
            names["constraint.json_schema"] = "response_format.json_schema.schema"
            names["constraint"] = "response_format"
        if self.reasoning_effort is not None:
            names[f"messages.template_arguments.{_EFFORT}"] = _EFFORT
        return names
