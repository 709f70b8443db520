"""The Triton noise, logarithm and exponential are the torch references', bit for bit."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from betoken.kernels import dispatch, float_math, noise
from betoken.kernels.triton_math import EXACT, exp_f32, gumbel_f32, log_f32
from tests.products import slow

TABLE = Path(__file__).parents[1] / "noise_table.csv"
EDGE_WORDS = [0, 1, 2, 2**24, 2**25 - 2, 2**25 - 1, 2**25, 2**31, 2**32 - 2**8, 2**32 - 129, 2**32 - 128, 2**32 - 1]
BLOCK = 1024


def bits(values: torch.Tensor) -> list[int]:
    return values.cpu().view(torch.int32).tolist()


@pytest.mark.parametrize("vocab_size", [1, 63, 257, 1025, *slow(256, 1000, 4096)])
def test_noise_equals_reference(vocab_size: int, device: torch.device, takes_triton) -> None:
    seeds = noise.seeds_tensor([0, 2**64 - 1, 2**63, 2**32, 12345], device)
    positions = torch.tensor([0, 2**31 - 1, 2**32 - 1, 7, 4095], device=device)
    for stream in range(4):
        with dispatch.override("reference"):
            expected = noise.gumbel(seeds, positions, vocab_size, stream)
        with takes_triton():
            got = noise.gumbel(seeds, positions, vocab_size, stream)
        assert bits(got) == bits(expected)


def test_noise_table(device: torch.device, takes_triton) -> None:
    for line in TABLE.read_text().splitlines()[1:]:
        seed, position, token_id, stream, expected = (int(number, 0) for number in line.split(","))
        if device.type == "cpu" and token_id > 4096:
            continue  # the interpreter would need seconds for all the ids below it
        with takes_triton():
            seeds, positions = noise.seeds_tensor([seed], device), torch.tensor([position], device=device)
            got = noise.gumbel(seeds, positions, token_id + 1, stream)
        assert bits(got)[0][token_id] & 0xFFFFFFFF == expected


@triton.jit
def _apply(values, words, logs, exps, gumbels, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = place < count
    x = tl.load(values + place, mask=is_inside, other=1.0)
    tl.store(logs + place, log_f32(x), mask=is_inside)
    tl.store(exps + place, exp_f32(-x), mask=is_inside)
    word = tl.load(words + place, mask=is_inside, other=0).to(tl.uint32)
    tl.store(gumbels + place, gumbel_f32(word), mask=is_inside)


def test_noise_arithmetic_equals_the_reference(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    words = torch.cat((torch.tensor(EDGE_WORDS), torch.randint(0, 2**32, (20_000,), generator=generator)))
    values = torch.rand(len(words), generator=generator) * 90 + 1e-9
    values[:4] = torch.tensor([87.0, 87.0001, torch.inf, 1.0])
    values, words = values.to(device), words.to(device)
    logs, exps, gumbels = (torch.full_like(values, torch.nan) for _ in range(3))
    grid = (triton.cdiv(len(words), BLOCK),)
    _apply[grid](values, words, logs, exps, gumbels, len(words), BLOCK=BLOCK, **EXACT)
    is_finite = values.isfinite()
    assert bits(logs[is_finite]) == bits(float_math.log(values[is_finite]))
    assert bits(exps) == bits(float_math.exp(-values))
    assert bits(gumbels) == bits(noise.to_gumbel(words))
