"""`/v1/chat/completions`: its body, and its answers, whole and in events.

Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from betoken.client import AsyncGeneration, Completion, Piece
from betoken.gateway.body import GenerationBody, Refusals, refuse
from betoken.gateway.constraint import check_response_format
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.logprobs import chat_logprobs
from betoken.gateway.messages import Message
from betoken.gateway.question import Question

MAX_TOP_LOGPROBS = 20


class ChatBody(GenerationBody):
    """What may be asked."""

    refused: ClassVar[Refusals] = {
        "audio": ("is not supported: answers are text", ()),
        "modalities": ("must be text alone", (["text"],)),
        "functions": ("is deprecated and not supported: send tools", ([],)),
        "function_call": ("is deprecated and not supported: send tool_choice", ("none",)),
        "tools": ("is not supported yet", ([],)),
        "tool_choice": ("is not supported yet", ("none", "auto")),
        "parallel_tool_calls": ("is not supported yet", (True,)),
        "prediction": ("is not supported yet", ()),
        "web_search_options": ("is not supported: nothing is looked up", ()),
        "metadata": ("is not supported: nothing is stored", ({},)),
        "store": ("is not supported: nothing is stored", (False,)),
        "service_tier": ("must be auto or default", ("auto", "default")),
        "verbosity": ("is not supported: no template knows it", ("medium",)),
        "reasoning_effort": ("is not supported: the model's template knows none", ("none",)),
        "prompt_cache_key": ("is not supported: prompts are found by their tokens", ()),
        "prompt_cache_retention": ("is not supported: what is kept depends on room", ()),
        "safety_identifier": ("is not supported: send user", ()),
    }
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, description="Most tokens of an answer; absent = what fits, at most 1024.")
    max_completion_tokens: int | None = Field(None, description="The same by its newer name.")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: dict[str, Any] | None = Field(None, description="text only.")

    @field_validator("response_format")
    @classmethod
    def _check_format(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_response_format(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs", "needs logprobs: true")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise refuse("max_completion_tokens", "is the newer name of max_tokens, which says something else")
        return self

    def questions(self) -> list[Question]:
        """One for each choice."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self.sampling(max_new_tokens=most, logprobs=logprobs)
        messages = [message.for_template() for message in self.messages]
        speculation = self.betoken.speculation()
        return [
            Question(messages, seed, sampling, speculation, self.model, self.user, self._names())
            for seed in self.seeds()
        ]

    def _names(self) -> Mapping[str, str]:
        name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"sampling.max_new_tokens": name, "sampling.logprobs": "top_logprobs"}


class ChatForm(Form):
    """Answers as OpenAI's `chat.completion` objects."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, request_id: str) -> None:
        super().__init__(body, request_id)
        self._body = body

    @property
    def num_choices(self) -> int:
        return self._body.n

    def prompt_index(self, index: int) -> int:
        return 0

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.tokens, self.bytes_of) if self._body.logprobs else None,
            "finish_reason": str(answer.finish_reason),
            "betoken": choice_extension(answer, self._body.betoken.provenance),
        }

    def opening(self, index: int, asked: AsyncGeneration) -> dict[str, Any] | None:
        return self._event_choice(index, {"role": "assistant", "content": ""}) | {"betoken": {"seed": asked.seed}}

    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        choice = self._event_choice(index, {"content": piece.text} if piece.text else {})
        if self._body.logprobs and piece.tokens:
            choice["logprobs"] = chat_logprobs(piece.tokens, self.bytes_of)
        if told := piece_extension(piece, self._body.betoken):
            choice["betoken"] = told
        return choice if piece.text or choice["logprobs"] or "betoken" in choice else None

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        choice = self._event_choice(index, {}, str(answer.finish_reason))
        return choice | {"betoken": choice_extension(answer, has_tokens=False)}

    @staticmethod
    def _event_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
