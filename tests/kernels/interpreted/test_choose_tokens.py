"""The engine chooses the same tokens whether its ops run in Triton or as torch references."""

import dataclasses

import pytest
import torch

from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.kernels import dispatch

EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    logit_bias=((3, 2.5), (0, -1.0)),
    seed=2**64 - 5,
    min_new_tokens=4,
    eos_token_ids=(1,),
    num_logprobs=3,
)


def test_choose_tokens_of_a_mixed_batch_equals_the_reference(device: torch.device, takes_triton) -> None:
    groups = [
        SampleGroup(EVERYTHING, [5, 6, 7], [8], [9, 8]),
        SampleGroup(SamplingParams(temperature=0.0), [5], [], [4]),
        SampleGroup(dataclasses.replace(EVERYTHING, seed=3, num_logprobs=None, top_k=0), [5], [], []),
    ]
    logits = (torch.randn(6, 200, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16)
    before = logits.clone()
    with dispatch.override("reference"):
        expected = choose_tokens(logits, groups)
    with takes_triton():
        chosen = choose_tokens(logits.to(device), groups)
    assert chosen.token_ids == expected.token_ids and torch.equal(logits, before)
    for got, right in zip(chosen.logprobs, expected.logprobs, strict=True):
        assert (got is None) == (right is None)
        if got is not None and right is not None:
            assert got.top_ids == right.top_ids
            assert [got.logprob, *got.top_logprobs] == pytest.approx([right.logprob, *right.top_logprobs], abs=1e-5)
