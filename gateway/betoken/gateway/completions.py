"""`/v1/completions`: its body, and its answers, whole and in events.

Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, TypeAlias, cast

from pydantic import Field, model_validator

from betoken.client import AsyncGeneration, Completion, Piece, Prompt
from betoken.gateway.body import GenerationBody, Many, Prediction, Refusals, refuse, said_as
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.logprobs import TextLogprobs, ids_of_prompt, joined
from betoken.gateway.question import Question

Prompts: TypeAlias = Annotated[
    str | Many[str] | Many[int] | Many[Many[int]], said_as("must be text, token ids, or a list of either")
]

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_NAMES = {
    "sampling.logprobs": "logprobs",
    "sampling.prompt_logprobs": "logprobs",
    "prediction.text": "prediction.content",
    "infill.prefix": "prompt",
    "infill": "suffix",
}


class CompletionBody(GenerationBody):
    """The fields of a request."""

    refused: ClassVar[Refusals] = {
        "prompt_logprobs": ("is not supported: echo with logprobs reports them", ()),
    }
    prompt: Prompts = Field(description="Text or token ids, or a list of either: a choice for each.")
    suffix: str = Field("", description="Text after the answer, which fills the gap between the prompt and it.")
    max_tokens: int = Field(_DEFAULT_MAX_TOKENS, description="Most tokens of an answer; may be 0 with echo.")
    logprobs: int | None = Field(None, description="Most likely tokens reported with each token, 0 to 20.")
    echo: bool = Field(False, description="Whether the answer begins with the prompt.")
    prediction: Prediction | None = Field(None, description="As chats have it: drafted from; changes no token.")
    best_of: int | None = Field(None, description="Only n: no answer is thrown away.")

    @model_validator(mode="after")
    def _check(self) -> CompletionBody:
        if self.betoken.escape_special_tokens is not None:
            raise refuse("betoken.escape_special_tokens", "is of chats")
        if self.best_of not in (None, self.n):
            raise refuse("best_of", "must be n: no answer is thrown away")
        if not self.prompts():
            raise refuse("prompt", "must not be empty")
        if self.suffix:
            self._check_infill()
        return self

    def _check_infill(self) -> None:
        if not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise refuse("suffix", "needs prompts of text")
        if self.echo:
            raise refuse("echo", "must be false with suffix")
        if self.betoken.add_special_tokens is not None:
            raise refuse("betoken.add_special_tokens", "must be absent with suffix")

    def prompts(self) -> Sequence[Prompt]:
        """One or several."""
        prompt = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [cast(Prompt, prompt)]
        return cast(Sequence[Prompt], prompt)

    def questions(self) -> list[Question]:
        """One for each prompt."""
        of_prompt = (self.logprobs if self.max_tokens else self.logprobs or 0) if self.echo else None
        sampling = self.sampling(max_new_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=of_prompt)
        speculation = self.betoken.speculation()
        seed = self.first_seed()
        return [
            Question(
                prompt,
                seed,
                sampling,
                speculation,
                self.model,
                self.user,
                _NAMES,
                constraint=self.betoken.constraint,
                num_answers=self.n,
                add_special_tokens=self.betoken.add_special_tokens,
                prediction=None if self.prediction is None else self.prediction.text,
                suffix=self.suffix or None,
            )
            for prompt in self.prompts()
        ]


class CompletionForm(Form):
    """Answers as OpenAI's `text_completion` objects."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, body: CompletionBody, request_id: str) -> None:
        super().__init__(body, request_id)
        self._body = body
        self.echoes = body.echo
        self._logprobs = [TextLogprobs(self.bytes_of) for _ in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        return len(self._body.prompts()) * self._body.n

    def prompt_index(self, index: int) -> int:
        return index // self._body.n

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        prompt = self.prompts[self.prompt_index(index)] if self._body.echo else ""
        logprobs = None
        if self._body.logprobs is not None:
            of_prompt = [self._of_prompt(index, answer)] if self._body.echo else []
            logprobs = joined([*of_prompt, self._logprobs[index].of(answer.tokens)])
        return {
            "index": index,
            "text": prompt + answer.text,
            "logprobs": logprobs,
            "finish_reason": str(answer.finish_reason),
            "betoken": choice_extension(answer, self._body.betoken.provenance),
        }

    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any] | None:
        if not self._body.echo:
            return None
        choice = self._event_choice(index, self.prompts[self.prompt_index(index)])
        if self._body.logprobs is not None:
            choice["logprobs"] = self._of_prompt(index, asked)
        return choice

    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        choice = self._event_choice(index, piece.text)
        if self._body.logprobs is not None and piece.tokens:
            choice["logprobs"] = self._logprobs[index].of(piece.tokens)
        if told := piece_extension(piece, self._body.betoken):
            choice["betoken"] = told
        return choice if piece.text or choice["logprobs"] or "betoken" in choice else None

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        choice = self._event_choice(index, "", str(answer.finish_reason))
        return choice | {"betoken": choice_extension(answer, has_tokens=False)}

    def ids_of_prompt(self, asked: AsyncGeneration) -> set[int]:
        is_told = self._body.echo and self._body.logprobs is not None
        return ids_of_prompt(asked.prompt_ids, asked.prompt_logprobs) if is_told else set()

    def _of_prompt(self, index: int, answer: AsyncGeneration | Completion) -> dict[str, Any]:
        text = self.prompts[self.prompt_index(index)]
        return self._logprobs[index].of_prompt(text, answer.prompt_ids, answer.prompt_logprobs)

    @staticmethod
    def _event_choice(index: int, text: str, finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
