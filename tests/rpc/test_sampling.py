"""Sampling from request to engine: request beats model beats neutral, floats come back as they were written."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from betoken.common.float32 import shortest
from betoken.rpc.sampling import resolve_sampling, sampling_fields
from betoken.rpc.validation import validate_sampling
from betoken.v1.types_pb2 import LogitBias, OpenSequence, SamplingParams

SIZES = {"prompt_length": 10, "max_context": 100, "vocab_size": 64}


def resolve(requested: SamplingParams, defaults: SamplingParams | None = None) -> SamplingParams:
    resolved = resolve_sampling(requested, defaults or SamplingParams(), seed=42, **SIZES)
    validate_sampling(resolved, vocab_size=64, max_context=100, prompt_length=10)
    return resolved


def test_absent_sampling_fields_are_neutral_and_every_field_is_set():
    resolved = resolve(SamplingParams())
    for descriptor in SamplingParams.DESCRIPTOR.fields:
        if descriptor.has_presence and descriptor.name not in ("logprobs", "prompt_logprobs"):
            assert resolved.HasField(descriptor.name), descriptor.name
    assert (resolved.temperature, resolved.top_k, resolved.top_p, resolved.seed) == (1.0, 0, 1.0, 42)
    assert resolved.max_new_tokens == 90, "what the context has room for"
    assert not resolved.HasField("logprobs") and not resolved.HasField("prompt_logprobs")


def test_max_new_tokens_of_zero_stays_zero_and_leaves_a_worker_room_for_one_token():
    resolved = resolve(SamplingParams(max_new_tokens=0, prompt_logprobs=3), SamplingParams(min_new_tokens=5))
    assert (resolved.max_new_tokens, resolved.min_new_tokens, resolved.prompt_logprobs) == (0, 0, 3)
    assert sampling_fields(OpenSequence(prompt_ids=[1], max_length=2, sampling=resolved))["max_new_tokens"] == 1


def test_sampling_defaults_of_the_model_fill_absent_fields():
    defaults = SamplingParams(temperature=0.6, top_k=50_000, max_new_tokens=1000, min_new_tokens=500)
    resolved = resolve(SamplingParams(top_p=0.5, seed=7), defaults)
    assert abs(resolved.temperature - 0.6) < 1e-6
    assert (resolved.top_k, resolved.top_p, resolved.seed) == (64, 0.5, 7)
    assert (resolved.max_new_tokens, resolved.min_new_tokens) == (90, 90)


def test_a_sampling_field_of_zero_is_not_absent():
    requested = SamplingParams(temperature=0.0, top_k=0, seed=0, presence_penalty=0.0, logprobs=0, ignore_eos=False)
    resolved = resolve(requested, SamplingParams(temperature=0.6, top_k=5, presence_penalty=1.0, ignore_eos=True))
    assert (resolved.temperature, resolved.top_k, resolved.seed, resolved.presence_penalty) == (0, 0, 0, 0)
    assert resolved.HasField("logprobs")
    assert not resolved.ignore_eos


@pytest.mark.parametrize(("asked", "used"), [(0.0, 0.0), (1e-6, 0.0), (0.00999, 0.0), (0.01, 0.01), (0.6, 0.6)])
def test_a_temperature_close_to_greedy_is_greedy_whoever_asks(asked: float, used: float) -> None:
    options = {"seed": 1, "prompt_length": 1, "max_context": 9, "vocab_size": 9}
    asking, silent = SamplingParams(temperature=asked), SamplingParams()
    entry = OpenSequence(prompt_ids=[1], sampling=asking, max_length=4)
    resolved = [resolve_sampling(*pair, **options) for pair in ((asking, silent), (silent, asking))]
    assert {shortest(each.temperature) for each in resolved} == {used}
    assert sampling_fields(entry)["temperature"] == used


def test_long_contexts_have_a_default_max_new_tokens():
    resolved = resolve_sampling(
        SamplingParams(), SamplingParams(), seed=1, prompt_length=10, max_context=100_000, vocab_size=64
    )
    assert resolved.max_new_tokens == 1024


def test_sampling_fields_reach_the_engine():
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        seed=2**64 - 1,
        logit_bias=[LogitBias(token_id=3, bias=-0.1)],
        stop_token_ids=[4],
        logprobs=2,
    )
    entry = OpenSequence(prompt_ids=[1, 2], max_length=12, eos_token_ids=[5], sampling=sampling)
    assert sampling_fields(entry) == {
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": ((3, -0.1),),
        "seed": 2**64 - 1,
        "max_new_tokens": 10,
        "min_new_tokens": 0,
        "ignore_eos": False,
        "eos_token_ids": (5,),
        "stop_token_ids": (4,),
        "num_logprobs": 2,
    }


@given(st.floats(width=32, allow_nan=False))
def test_the_shortest_decimal_of_a_float32_is_the_same_float32(value):
    assert struct.pack("<f", shortest(value)) == struct.pack("<f", value + 0.0)


@given(st.integers(0, 10**6), st.integers(0, 6))
def test_decimals_of_six_digits_survive_float32(digits, exponent):
    written = float(f"{digits}e-{exponent}")
    assert shortest(struct.unpack("<f", struct.pack("<f", written))[0]) == written
