"""Shared parts of all request bodies: strict fields, null for absent, and fields that are refused by name.

Knows how a body becomes options of the SDK; nothing of what is answered.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from betoken.client import Sampling, Speculation, VerificationMode
from betoken.common.seeds import SEED_BITS
from betoken.gateway.described import describe_body

Refusals: TypeAlias = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Fields of OpenAI's that are refused: name -> (why, values that ask for nothing and are taken)."""

ItemT = TypeVar("ItemT")


class _StopAtFirst(FailFast):
    """Hashable, so that unions can hold it."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


Many: TypeAlias = Annotated[list[ItemT], _StopAtFirst()]
"""List whose validation stops at the first wrong entry: a million errors would take gigabytes."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
_MAX_DRAFTER_SETTINGS = 32
_SAMPLING_NAMES = [field.name for field in fields(Sampling)]

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
UNKNOWN_FIELD = "is not a known field"


def refuse(param: str, why: str) -> PydanticCustomError:
    """The error of a validator that names a field below its own."""
    return PydanticCustomError("refused", "{why}", {"param": param, "why": why})


def said_as(limit: str) -> WrapValidator:
    """One sentence in place of a line for every branch of a union."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(limit) from None

    return WrapValidator(validate)


def at_most(limit: int) -> BeforeValidator:
    """Check the number of entries of an object before its entries are validated."""

    def validate(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} entries, has {len(value)}")
        return value

    return BeforeValidator(validate)


class Body(BaseModel):
    """A JSON object: `null` is the same as absent, unknown and refused fields are named."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    refused: ClassVar[Refusals] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        reference = handler(core_schema)
        describe_body(handler.resolve_ref_schema(reference), cls.refused)
        return reference

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        unknown = given.keys() - cls.model_fields.keys() - cls.refused.keys()
        for name in sorted(unknown)[1:]:  # one is enough to reject the body: each costs an error
            del given[name]
        for name, (why, neutral) in cls.refused.items():
            if name in given:
                value = given.pop(name)
                if not any(_is_same(value, one) for one in neutral):
                    raise refuse(name, why)
        return given


def _is_same(given: Any, neutral: Any) -> bool:
    return type(given) is type(neutral) and bool(given == neutral)


DrafterSetting: TypeAlias = Annotated[str | int | float, said_as("must be text or a number")]


class Extension(Body):
    """Betoken's extension: speculation and reports."""

    drafter: str | None = Field(None, description="Name of a drafter, see /v1/models; absent = the router's choice.")
    drafter_settings: Annotated[dict[str, DrafterSetting], at_most(_MAX_DRAFTER_SETTINGS)] | None = Field(
        None, description="Settings of that drafter."
    )
    num_draft_tokens: int | None = Field(None, description="Draft tokens per round; absent = adaptive.")
    off: bool | None = Field(None, description="Decode without speculation.")
    mode: Literal["coupled", "rejection", "typical"] | None = Field(None, description="Verification mode.")
    posterior_threshold: float | None = Field(
        None, description="Mode typical: a draft token stays above this probability, or above the next; absent = 0.09."
    )
    posterior_alpha: float | None = Field(
        None, description="Mode typical: this times exp(-entropy), the other bound; absent = 0.3."
    )
    constraint: dict[str, Any] | None = Field(
        None, description="What the answer has to be: one of json_object, json_schema, regex, choice, lark."
    )
    add_special_tokens: bool | None = Field(
        None, description="Completions: whether a text gets the tokenizer's own BOS."
    )
    escape_special_tokens: bool | None = Field(
        None, description="Chats: whether names of special tokens in messages are text."
    )
    provenance: bool = Field(False, description="Whether each token is reported with its id and source.")
    rounds: bool = Field(False, description="Whether the times of each round are reported.")

    def speculation(self) -> Speculation:
        """For the SDK."""
        mode = None if self.mode is None else VerificationMode(self.mode)
        return Speculation(
            self.drafter,
            self.drafter_settings,
            self.num_draft_tokens,
            self.off,
            mode,
            self.rounds or None,
            self.posterior_threshold,
            self.posterior_alpha,
        )


Stop: TypeAlias = Annotated[str | Many[str], said_as("must be text or a list of texts")]


CACHE_BREAKPOINT: Refusals = {"prompt_cache_breakpoint": ("is not supported: prompts are found by their tokens", ())}


class StreamOptions(Body):
    """Options of a stream."""

    refused: ClassVar[Refusals] = {"include_obfuscation": ("is not offered: events are as long as they are", (False,))}
    include_usage: bool = Field(False, description="Whether a last event reports the usage.")


class PredictionPart(Body):
    """A part of what is expected."""

    refused: ClassVar[Refusals] = CACHE_BREAKPOINT
    type: Literal["text"]
    text: str


class Prediction(Body):
    """The predicted answer, perhaps with differences."""

    type: Literal["content"]
    content: Annotated[str | Many[PredictionPart], said_as("must be text, or a list of parts of type text")]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationBody(Body):
    """The fields that completions of text and of chats share."""

    model: str = Field("", description="Model id; absent = the served one.")
    n: int = Field(1, ge=1, description="Number of answers, each with its own reported seed.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 = greedy; absent = the model's own default.")
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_LOGIT_BIASES)] | None = Field(
        None, description="Added to logits, by token id."
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="Same request, same seed: same tokens.")
    stop: Stop | None = None
    stop_token_ids: Many[int] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    user: str = Field("", description="Whom the work is for: the router's tenant.")
    betoken: Extension = Field(default_factory=lambda: Extension.model_validate({}))

    @field_validator("logit_bias")
    @classmethod
    def _check_ids(cls, biases: dict[str, float]) -> dict[str, float]:
        for name in biases:
            if not _TOKEN_ID.fullmatch(name):
                raise ValueError(f"{name[:40]!r} is not a token id")
        return biases

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise refuse("stream_options", "needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with an event of its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, *, max_new_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> Sampling:
        """For the SDK, without a seed."""
        same = {name: getattr(self, name) for name in _SAMPLING_NAMES if name in type(self).model_fields}
        return Sampling(
            **same
            | {
                "logit_bias": None if self.logit_bias is None else {int(k): v for k, v in self.logit_bias.items()},
                "seed": None,
                "max_new_tokens": max_new_tokens,
                "min_new_tokens": self.min_tokens,
                "logprobs": logprobs,
                "prompt_logprobs": prompt_logprobs,
            }
        )

    def first_seed(self) -> int:
        """The seed of the first answer, from which the others are derived."""
        return secrets.randbits(SEED_BITS) if self.seed is None else self.seed % 2**64
