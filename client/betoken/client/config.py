"""A caller's options, one small frozen class per concern.

Values are checked by the router, which alone knows the model's limits; this module knows neither gRPC nor the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Real
from typing import Any, TypedDict, cast


class VerificationMode(StrEnum):
    """How draft tokens are compared with the target."""

    COUPLED = "coupled"
    """The target's own tokens, whatever the draft: same request and seed, same tokens. The default."""
    REJECTION = "rejection"
    """Rejection sampling: exact in distribution, but the tokens depend on the draft."""
    TYPICAL = "typical"
    """Typical acceptance: lossy."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None takes the served model's default (`model_info().default_sampling`)."""

    temperature: float | None = None
    """Softmax temperature; 0 = greedy, as is all below 0.01; at most 100."""
    top_k: int | None = None
    """Keep the k most likely ids; 0 = all."""
    top_p: float | None = None
    """Keep the smallest set of ids whose probability reaches it; above 0, at most 1."""
    min_p: float | None = None
    """Keep ids with at least this share of the largest probability; 0 to 1."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of ids seen in prompt and output; 0.001 to 10."""
    presence_penalty: float | None = None
    """Subtracted once from the logit of ids present in the output; -2 to 2."""
    frequency_penalty: float | None = None
    """Subtracted per occurrence in the output; -2 to 2."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these ids, -100 to 100 each; at most 1024 ids."""
    seed: int | None = None
    """Seed of the noise, any unsigned 64-bit integer; None = drawn by the router, to be read from the answer."""
    max_new_tokens: int | None = None
    """Most output tokens; None = what the context has room for, at most 1024."""
    min_new_tokens: int | None = None
    """EOS and stop ids are masked until this many output tokens; a stop string counts if it ends after them."""
    stop: str | Sequence[str] | None = None
    """The answer ends before the first of these strings, or at the special token that one of them names; at most 16,
    each 1 to 256 bytes."""
    stop_token_ids: Sequence[int] | None = None
    """The answer ends after one of these ids, besides EOS; at most 64."""
    ignore_eos: bool | None = None
    """EOS does not end the answer."""
    logprobs: int | None = None
    """Most likely ids reported per token besides the token itself, 0 to 20; None = no logprobs."""
    prompt_logprobs: int | None = None
    """Most likely ids reported per token of the prompt, likewise (`Completion.prompt_logprobs`); `max_new_tokens` may
    then be 0. The prompt is computed whole, whatever is cached of it."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate; in the COUPLED mode nothing here changes a token."""

    drafter: str | None = None
    """Name of a drafter (`model_info().drafters`); None = the router's default."""
    drafter_settings: Mapping[str, str | int | float] | None = None
    """Settings of that drafter, e.g. {"max_ngram": 4}; checked with the first draft, if any (answers of one token have
    none)."""
    num_draft_tokens: int | None = None
    """Draft tokens per round; None = the router's choice."""
    off: bool | None = None
    """Decode without speculation; drafter, drafter_settings and num_draft_tokens must then be None."""
    mode: VerificationMode | None = None
    """Verification mode; None = COUPLED."""
    report_rounds: bool | None = None
    """Whether pieces include the times of their rounds."""
    posterior_threshold: float | None = None
    """In the mode TYPICAL a draft token x stays where target(x) > min(posterior_threshold, posterior_alpha *
    exp(-entropy(target))); 0 to 1, None = 0.09. Must be None in other modes."""
    posterior_alpha: float | None = None
    """0 to 10, None = 0.3. Must be None in other modes."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Handling of broken calls; a broken answer is resumed at its last token, without repetition or loss."""

    max_retries: float = math.inf
    """Retries in a row without a token in between; 0 = never."""
    max_failing_s: float = 60.0
    """How long attempts may fail in a row, seconds from the first failure; inf leaves it to the
    deadline, which may be sooner anyway."""
    initial_backoff_s: float = 0.1
    """Longest wait before the first retry, doubled for each further one; the wait is drawn from its upper half."""
    max_backoff_s: float = 5.0
    """Bound of that doubling."""
    max_outage_s: float = math.inf
    """No retry once no token has come for so long; a router without workers takes its own time for each answer."""
    retry_when_exhausted: bool = False
    """Also retry when the router is overloaded, not before the time it names."""
    retry_while_loading: bool = True
    """Also retry while the model is being loaded (`LoadingError`)."""

    def __post_init__(self) -> None:
        for name in ("max_retries", "max_failing_s", "initial_backoff_s", "max_backoff_s", "max_outage_s"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and cast(float, value) >= 0):
                raise ValueError(f"{name} is {value!r}, must be a number of at least 0")


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling` as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None


class SpeculationOptions(TypedDict, total=False):
    """The fields of `Speculation` as keyword arguments."""

    drafter: str | None
    drafter_settings: Mapping[str, str | int | float] | None
    num_draft_tokens: int | None
    off: bool | None
    mode: VerificationMode | None
    report_rounds: bool | None
    posterior_threshold: float | None
    posterior_alpha: float | None


class PromptOptions(TypedDict, total=False):
    """How a prompt becomes ids."""

    add_special_tokens: bool
    """Whether the tokenizer adds its special tokens (BOS) to a text, which is the default. A chat that is
    rendered already has them."""
    tools: Sequence[Mapping[str, Any]]
    """Tools for the chat template, each a JSON object; chats only."""
    template_arguments: Mapping[str, Any]
    """Further variables for the chat template, such as `enable_thinking`; chats only."""
    continue_final_message: bool
    """Whether the answer goes on with the last message of a chat; otherwise the assistant begins a new turn."""
    escape_special_tokens: bool
    """Whether names of special tokens in a chat's messages stay text; otherwise they become the tokens."""


class Constraint(TypedDict, total=False):
    """Constraint on an answer: exactly one of these. EOS ends the answer when it is complete."""

    json_object: bool
    """Any JSON object: True."""
    json_schema: Mapping[str, Any] | str
    """JSON that a JSON schema takes; a keyword that cannot be kept is refused."""
    regex: str
    """Text that a regular expression matches as a whole."""
    choice: Sequence[str]
    """One of these texts."""
    lark: str
    """A context-free grammar, in llguidance's variant of Lark."""


class GenerateOptions(SamplingOptions, SpeculationOptions, PromptOptions, total=False):
    """Every keyword argument of `generate`; a single field wins over the same field of `sampling` or `speculation`."""

    suffix: str | None
    """Text after the answer, which fills the gap between the prompt, a text, and it (`ModelInfo.supports_infill`)."""
    files: Sequence[tuple[str, str]]
    """Names and texts of further files for an answer with a suffix, the most relevant last."""
    sampling: Sampling | None
    """All of `Sampling` at once."""
    speculation: Speculation | None
    """All of `Speculation` at once."""
    constraint: Constraint | None
    """Constraint on the answer, e.g. `{"json_schema": {...}}`; None = unconstrained."""
    prediction: str | Sequence[int] | None
    """Text or ids of which the answer is expected to repeat long parts: drafted from, and changes no token."""
    n: int | None
    """Number of answers, each with its own seed derived from the request's; None = one. A piece has its
    answer (`Piece.answer`); `complete_all` or `results()` gives all."""
    model: str
    """Model id the router must be serving; empty = whatever it serves."""
    tenant: str
    """Tenant, used for fair queueing, quotas and traces; at most 128 bytes."""
    resume_ids: Sequence[int]
    """Output ids of an earlier answer to go on after, not sent again; needs its `seed` where temperature is not 0."""
    system_fingerprint: str
    """Only a system of this fingerprint may answer (`Completion.system_fingerprint`); empty = any."""
    timeout_s: float | None
    """Deadline of the whole answer, resumptions included; None = the client's."""
    headers: Mapping[str, str]
    """Further headers of each call, such as `authorization`: lower-case names, printable ASCII."""
