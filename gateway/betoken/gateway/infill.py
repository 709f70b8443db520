"""`/infill` and `/completion` of llama.cpp's server: their bodies.

Fields of llama.cpp are honoured, have no effect that a client could miss, or are rejected by name; docs/http.md lists
them. Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from betoken.client import Sampling
from betoken.gateway.body import Body, GenerationBody, Many, Refusals, refuse, said_as
from betoken.gateway.infill_end import EndRules, InfillQuestion
from betoken.gateway.question import Question

_NAMES = {
    "infill.prefix": "input_prefix",
    "infill.files": "input_extra",
    "infill": "input_suffix",
    "sampling.max_new_tokens": "n_predict",
    "max_length": "n_predict",
    "sampling.repetition_penalty": "repeat_penalty",
}
_NO_EFFECT = "Without effect: "
_SWITCHED_OFF: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "min_keep": (0,),
}
"""Samplers that do not exist here, with the values that switch them off."""

Sampler: TypeAlias = Literal[
    "dry", "top_k", "typ_p", "top_p", "top_n_sigma", "min_p", "xtc", "temperature", "penalties", "infill"
]


class ExtraFile(Body):
    """A further file, or a part of one."""

    text: str
    filename: str = Field("", description="Its name, for models with tokens for files.")
    time: Any = Field(None, description=f"{_NO_EFFECT}llama.vim notes when it took the text.")


class LlamaBody(GenerationBody):
    """The fields that both have."""

    refused: ClassVar[Refusals] = {
        **{name: ("is not supported", neutral) for name, neutral in _SWITCHED_OFF.items()},
        "n": ("must be 1", (1,)),
        "n_cmpl": ("must be 1", (1,)),
        "stream_options": ("is not supported: the last event has the counts", ()),
        "repetition_penalty": ("is repeat_penalty here", ()),
        "min_tokens": ("is not supported", (0,)),
        "repeat_last_n": ("must be -1: penalties count the whole text", (-1,)),
        "n_keep": ("must be 0: a prompt is cut to the context, and not shifted", (0, -1)),
        "n_probs": ("is not supported: /v1/completions has logprobs", (0,)),
        "post_sampling_probs": ("is not supported", (False,)),
        "timings_per_token": ("is not supported: the last event has the times", (False,)),
        "return_progress": ("is not supported", (False,)),
        "grammar": ("is not supported: use betoken.constraint", ("",)),
        "json_schema": ("is not supported: use betoken.constraint", ()),
        "lora": ("is not supported", ([],)),
    }
    n_predict: int = Field(-1, ge=-1, description="Most tokens; 0 = prepare the prompt only, -1 = the default.")
    n_indent: int = Field(0, ge=0, description="Least indentation of each line after the first; 0 = any.")
    t_max_predict_ms: float = Field(0, ge=0, description="Time limit after the first token, at a line end; 0 = none.")
    samplers: Many[Sampler] | None = Field(None, description="Samplers that are applied; absent = all.")
    repeat_penalty: float | None = Field(None, description="Repetition penalty on prompt and output.")
    return_tokens: bool = Field(False, description="Whether the answer has its token ids.")
    response_fields: Many[str] | None = Field(None, description="Fields of the answer, nested ones after a slash.")
    penalty_last_n: int = Field(-1, description=f"{_NO_EFFECT}Tabby sends it, llama.cpp does not know it.")
    id_slot: int = Field(-1, description=f"{_NO_EFFECT}requests have no slots.")
    cache_prompt: bool = Field(True, description=f"{_NO_EFFECT}computed prefixes are reused and change no token.")
    n_cache_reuse: int = Field(0, description=f"{_NO_EFFECT}computed prefixes are reused whatever their length.")
    t_max_prompt_ms: float = Field(0, description=f"{_NO_EFFECT}llama.cpp has none either.")
    dry_base: float = Field(1.75, description=f"{_NO_EFFECT}dry_multiplier is 0.")
    dry_allowed_length: int = Field(2, description=f"{_NO_EFFECT}dry_multiplier is 0.")
    dry_penalty_last_n: int = Field(-1, description=f"{_NO_EFFECT}dry_multiplier is 0.")
    dry_sequence_breakers: Many[str] = Field(default_factory=list, description=f"{_NO_EFFECT}dry_multiplier is 0.")
    xtc_threshold: float = Field(0.1, description=f"{_NO_EFFECT}xtc_probability is 0.")
    mirostat_tau: float = Field(5.0, description=f"{_NO_EFFECT}mirostat is 0.")
    mirostat_eta: float = Field(0.1, description=f"{_NO_EFFECT}mirostat is 0.")
    dynatemp_exponent: float = Field(1.0, description=f"{_NO_EFFECT}dynatemp_range is 0.")

    @property
    def _most(self) -> int | None:
        """Most tokens; 0 only prepares the prompt, which is computed with its first token."""
        return None if self.n_predict < 0 else max(1, self.n_predict)

    @property
    def _end(self) -> EndRules:
        return EndRules(self.n_indent, self.t_max_predict_ms / 1000, is_empty=self.n_predict == 0)

    def first_seed(self) -> int:
        """The seed; -1 draws one, as in llama.cpp."""
        if self.seed == -1:
            return self.model_copy(update={"seed": None}).first_seed()
        return super().first_seed()

    def _applied(self, given: Sampling) -> Sampling:
        """Without the samplers that are not listed. `infill` leaves the likeliest token, or few others: greedy."""
        penalty, listed = self.repeat_penalty, self.samplers
        if listed is None:
            return replace(given, repetition_penalty=penalty)
        neutral: dict[str, Any] = {
            name: value for name, value in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)) if name not in listed
        }
        if "penalties" not in listed:
            penalty = 1.0
            neutral |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        if "infill" in listed:
            neutral["temperature"] = 0.0
        elif "temperature" not in listed:
            neutral["temperature"] = 1.0
        return replace(given, repetition_penalty=penalty, **neutral)


class InfillBody(LlamaBody):
    """The fields of a gap."""

    input_prefix: str = Field(description="Text before the gap.")
    input_suffix: str = Field(description="Text after the gap.")
    input_extra: Many[ExtraFile] = Field(default_factory=list, description="Further files, the most relevant last.")
    prompt: str = Field("", description="Text between input_prefix and the gap.")

    @model_validator(mode="after")
    def _check(self) -> InfillBody:
        for name in ("add_special_tokens", "escape_special_tokens"):
            if getattr(self.betoken, name) is not None:
                raise refuse(f"betoken.{name}", "must be absent: names of special tokens are text")
        return self

    def questions(self) -> list[Question]:
        """The one question."""
        return [
            InfillQuestion(
                self.input_prefix + self.prompt,
                self.first_seed(),
                self._applied(self.sampling(max_new_tokens=self._most, logprobs=None)),
                self.betoken.speculation(),
                self.model,
                self.user,
                _NAMES,
                constraint=self.betoken.constraint,
                suffix=self.input_suffix,
                files=[(file.filename, file.text) for file in self.input_extra],
                end=self._end,
            )
        ]


class LlamaCompletionBody(LlamaBody):
    """The fields of a text to go on with."""

    prompt: Annotated[str | Many[int], said_as("must be text or token ids")] = Field(description="Text or token ids.")

    @model_validator(mode="after")
    def _check(self) -> LlamaCompletionBody:
        if self.betoken.escape_special_tokens is not None:
            raise refuse("betoken.escape_special_tokens", "is of chats")
        return self

    def questions(self) -> list[Question]:
        """The one question."""
        return [
            InfillQuestion(
                self.prompt,
                self.first_seed(),
                self._applied(self.sampling(max_new_tokens=self._most, logprobs=None)),
                self.betoken.speculation(),
                self.model,
                self.user,
                _NAMES,
                constraint=self.betoken.constraint,
                add_special_tokens=self.betoken.add_special_tokens,
                end=self._end,
            )
        ]
