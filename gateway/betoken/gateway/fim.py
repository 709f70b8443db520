"""`/v1/fim/completions` of Mistral's protocol: its body, and its answers, whole and in events.

Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from betoken.client import AsyncGeneration, Completion, Piece
from betoken.gateway.body import GenerationBody, Refusals, refuse
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.question import Question

_NAMES = {"sampling.max_new_tokens": "max_tokens", "infill.prefix": "prompt", "infill": "suffix"}


class FimBody(GenerationBody):
    """The fields of a request."""

    refused: ClassVar[Refusals] = {"n": ("must be 1", (1,)), "seed": ("is random_seed here", ())}
    prompt: str = Field(description="Text before the gap.")
    suffix: str = Field("", description="Text after the gap; absent or empty = the prompt is completed.")
    max_tokens: int | None = Field(None, description="Most tokens; absent = the router's default.")
    random_seed: int | None = Field(None, ge=0, lt=2**64, description="Same request, same seed: same tokens.")

    @model_validator(mode="after")
    def _check(self) -> FimBody:
        for name in ("add_special_tokens", "escape_special_tokens"):
            if getattr(self.betoken, name) is not None:
                raise refuse(f"betoken.{name}", "must be absent")
        return self

    def questions(self) -> list[Question]:
        """The one question."""
        return [
            Question(
                self.prompt,
                self.model_copy(update={"seed": self.random_seed}).first_seed(),
                self.sampling(max_new_tokens=self.max_tokens, logprobs=None),
                self.betoken.speculation(),
                self.model,
                self.user,
                _NAMES,
                constraint=self.betoken.constraint,
                suffix=self.suffix or None,
            )
        ]


class FimForm(Form):
    """Answers as `chat.completion` objects; every event has a text, which clients of Mistral's require."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    prefix = "fim"
    num_choices = 1

    def __init__(self, body: FimBody, request_id: str) -> None:
        super().__init__(body, request_id)
        self._extension = body.betoken

    def prompt_index(self, index: int) -> int:
        return 0

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        return {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text, "tool_calls": None},
            "finish_reason": str(answer.finish_reason),
            "betoken": choice_extension(answer, self._extension.provenance),
        }

    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any] | None:
        return _event_choice("") | {"betoken": {"seed": seed}}

    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        extension = piece_extension(piece, self._extension)
        choice = _event_choice(piece.text) | ({"betoken": extension} if extension else {})
        return choice if piece.text or extension else None

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        return _event_choice("", str(answer.finish_reason)) | {"betoken": choice_extension(answer, has_tokens=False)}


def _event_choice(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
