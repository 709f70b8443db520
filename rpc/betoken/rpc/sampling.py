"""Sampling on its way from a request to an engine: filled up with the model's defaults, then as plain arguments.

Knows the messages; knows no engine and checks no limits (see `validation`).
"""

from typing import Any

from betoken.common.float32 import shortest
from betoken.rpc.validation.sampling import MIN_TEMPERATURE
from betoken.v1.types_pb2 import OpenSequence, SamplingParams, WorkerHello

DEFAULT_MAX_NEW_TOKENS = 1024
"""Default number of output tokens, if the context has room for them."""

NEUTRAL = SamplingParams(
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    min_new_tokens=0,
    ignore_eos=False,
)
"""Values of fields that are absent in the request and in the model's generation config."""

_NAMES = tuple(field.name for field, _ in NEUTRAL.ListFields())


def resolve_sampling(
    requested: SamplingParams,
    defaults: SamplingParams,
    *,
    seed: int,
    prompt_length: int,
    max_context: int,
    vocab_size: int,
) -> SamplingParams:
    """Every field set: the request's, else the model's default, else neutral. Lists are the request's own.

    `requested` has passed `validate_sampling`; `defaults` are the worker's and are cut to what the context and the
    vocabulary allow. `seed` (64 random bits) is used if the request has none. `logprobs` and `prompt_logprobs`
    stay absent when absent: that means none.
    """
    room = max_context - prompt_length
    resolved = SamplingParams()
    resolved.CopyFrom(requested)
    for name in _NAMES:
        if not requested.HasField(name):
            source = defaults if defaults.HasField(name) else NEUTRAL
            setattr(resolved, name, getattr(source, name))
    resolved.temperature = effective_temperature(resolved.temperature)
    if not requested.HasField("seed"):
        resolved.seed = seed
    if not requested.HasField("max_new_tokens"):
        wanted = defaults.max_new_tokens if defaults.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS
        resolved.max_new_tokens = max(1, min(wanted, room), min(resolved.min_new_tokens, room))
    if not requested.HasField("top_k"):
        resolved.top_k = min(resolved.top_k, vocab_size)
    if not requested.HasField("min_new_tokens"):
        resolved.min_new_tokens = min(resolved.min_new_tokens, resolved.max_new_tokens)
    return resolved


def max_new_tokens(requested: SamplingParams, model: WorkerHello) -> int:
    """Output tokens that a prompt leaves room for if it can be cut: the request's, else the default, at most a quarter
    of the context."""
    if requested.HasField("max_new_tokens"):
        return max(1, requested.max_new_tokens)
    defaults = model.default_sampling
    wanted = defaults.max_new_tokens if defaults.HasField("max_new_tokens") else DEFAULT_MAX_NEW_TOKENS
    return max(1, min(wanted, model.max_context // 4))


def effective_temperature(asked: float) -> float:
    """0, greedy, for what is too close to it to be sampled with, else `asked`: many ask for greedy by 1e-6."""
    return 0.0 if shortest(asked) < MIN_TEMPERATURE else asked


def sampling_fields(entry: OpenSequence) -> dict[str, Any]:
    """The keyword arguments of `betoken.engine.sampling.SamplingParams` for an opened sequence.

    Absent fields take the neutral value; floats are the decimals the caller wrote, the same double in every process.
    """
    sampling = SamplingParams()
    sampling.CopyFrom(NEUTRAL)
    sampling.MergeFrom(entry.sampling)
    sampling.temperature = effective_temperature(sampling.temperature)
    has_max = sampling.HasField("max_new_tokens")
    return {
        **{name: _written(getattr(sampling, name)) for name in _NAMES},
        "logit_bias": tuple((bias.token_id, shortest(bias.bias)) for bias in sampling.logit_bias),
        "seed": sampling.seed,
        "max_new_tokens": max(1, sampling.max_new_tokens if has_max else entry.max_length - len(entry.prompt_ids)),
        "eos_token_ids": tuple(entry.eos_token_ids),
        "stop_token_ids": tuple(sampling.stop_token_ids),
        "num_logprobs": sampling.logprobs if sampling.HasField("logprobs") else None,
    }


def _written(value: Any) -> Any:
    """The decimal that a float32 was written as; other values unchanged."""
    return shortest(value) if isinstance(value, float) else value
