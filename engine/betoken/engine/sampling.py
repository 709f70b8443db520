"""How a request's tokens are chosen: one frozen, fully resolved, validated set of parameters.

It knows neither model defaults nor protocol messages: its maker sets every field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.001
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 1024
MAX_EOS_TOKEN_IDS = 64
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; every float is finite.

    Raises:
        ValueError: a field outside its range, naming field, value and limit.
    """

    temperature: float = 1.0
    """0 = greedy, otherwise 0.01 to 100."""
    top_k: int = 0
    """Keep the k most likely ids; 0 = all. More than the vocabulary holds is all."""
    top_p: float = 1.0
    """Keep the smallest set of ids that reaches this probability; above 0, at most 1."""
    min_p: float = 0.0
    """Keep ids at least this many times as likely as the most likely one; 0 to 1."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of ids in prompt + output; above 0, at most 10."""
    presence_penalty: float = 0.0
    """Subtracted once from ids in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, bias) pairs, ids unique, biases -100 to 100, at most 1024."""
    seed: int = 0
    """Seed of the noise, 0 to 2^64 - 1."""
    max_new_tokens: int = 1024
    """Largest number of output tokens, at least 1."""
    min_new_tokens: int = 0
    """EOS and stop ids are masked until this many output tokens; 0 to max_new_tokens."""
    ignore_eos: bool = False
    """EOS does not end the answer."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's EOS ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Further ids that end the answer, at most 64."""
    num_logprobs: int | None = None
    """Most likely ids reported per token, 0 to 20; None = no logprobs at all."""

    has_rules: bool = field(init=False, repr=False, compare=False)
    """Whether any field adjusts logits before the temperature does."""

    def __post_init__(self) -> None:
        temperature = self.temperature
        if temperature != 0.0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
            raise ValueError(f"temperature = {temperature}: must be 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}")
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p = {self.top_p}: must be above 0 and at most 1")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_range("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("seed", self.seed, 0, 2**64 - 1)
        _check_range("max_new_tokens", self.max_new_tokens, 1, math.inf)
        _check_range("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        if self.num_logprobs is not None:
            _check_range("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS)
        self._check_ids()
        has_rules = (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
            or self.min_new_tokens > 0
        )
        object.__setattr__(self, "has_rules", has_rules)

    def _check_ids(self) -> None:
        _check_range("len(logit_bias)", len(self.logit_bias), 0, MAX_LOGIT_BIASES)
        for token_id, bias in self.logit_bias:
            _check_range("logit_bias id", token_id, 0, math.inf)
            _check_range(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if len({token_id for token_id, _ in self.logit_bias}) != len(self.logit_bias):
            raise ValueError("logit_bias: ids must be unique")
        _check_range("len(stop_token_ids)", len(self.stop_token_ids), 0, MAX_STOP_TOKEN_IDS)
        for name in ("eos_token_ids", "stop_token_ids"):
            for token_id in getattr(self, name):
                _check_range(name, token_id, 0, math.inf)


def _check_range(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:  # also refuses NaN
        raise ValueError(f"{name} = {value}: must be {lowest} to {highest}")
