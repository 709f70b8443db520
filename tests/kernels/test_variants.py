"""A kernel is compiled a few times for a model: no number of rows, blocks or entries asks for another variant."""

import pytest
import torch

from betoken.engine.sampler import SampleGroup
from betoken.engine.sampler.verification import BlockGroup, VerificationMode, verify_blocks
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.kernels.expert_linear import expert_linear
from tests.kernels.variants import recorded_variants

PARAMS = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, presence_penalty=0.5, num_logprobs=3)
KERNELS = {"_adjust", "_decide", "_draw", "_narrow", "_rank", "_reject", "_row_weights", "_scan", "_typical"}
SIZES = [(1, 0), (1, 1), (1, 2), (1, 4), (2, 7), (3, 4), (5, 2), (9, 7), (13, 4), (200, 3)]
"""Blocks of a batch, and drafts of each."""


def verify(mode: VerificationMode, num_blocks: int, num_drafts: int, vocab_size: int) -> None:
    rows = SampleGroup(PARAMS, [5, 6], [7], list(range(num_drafts)))
    probs = [SparseProbs([i], [1.0]) for i in range(num_drafts)]
    logits = torch.zeros(num_blocks * rows.num_rows, vocab_size, dtype=torch.bfloat16)
    verify_blocks(logits, [BlockGroup(rows, mode, probs)] * num_blocks)


@pytest.mark.parametrize("vocab_size", [4096, 50257, 128256])
def test_a_kernel_has_one_variant_for_every_batch_size(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_variants(monkeypatch) as variants:
        for num_blocks, num_drafts in SIZES:
            for mode in VerificationMode:
                verify(mode, num_blocks, num_drafts, vocab_size)
    names = sorted(name for name, _ in variants)
    assert set(names) == KERNELS
    twice = [name for name in names if names.count(name) > 1]
    assert twice == ["_narrow"] * 2 + ["_scan"] * 2, "adjusted logits to draw from, raw ones to rank"


@pytest.mark.parametrize("num_inputs", [64, 4096])  # without and with ranges to add
def test_experts_have_a_variant_for_each_height_of_a_tile(num_inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(8, 96, num_inputs, dtype=torch.bfloat16)
    with recorded_variants(monkeypatch) as variants:
        for num_slots in (1, 2, 6, 32, 128, 129, 130, 256, 500, 512, 1000, 4096):
            ids = torch.zeros(num_slots, dtype=torch.int64)
            expert_linear(torch.zeros(num_slots, num_inputs, dtype=torch.bfloat16), weight, None, ids)
    names = sorted(name for name, _ in variants)
    assert names == ["_add_ranges"] * (num_inputs > 64) + ["_cut_tiles"] * 4 + ["_product"] * 4
