"""The noise: known answers, an independent Philox, exact float formulas, independence from the batch."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from betoken.kernels import float_math, noise

MAX_SEED = 2**64 - 1


def philox_in_python(seed: int, position: int, token_id: int, stream: int) -> int:
    """Written from the paper, not from the code under test."""
    c = [(token_id >> 10) << 8 | (token_id & 255), position, stream, 0]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[(token_id >> 8) & 3]


def bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def test_philox_gives_the_known_answer() -> None:
    word = noise.words([0], [0], 1024)[0]
    assert [f"{int(word[256 * i]):08x}" for i in range(4)] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


# (seed, position, id, stream) -> bits of the Gumbel value.
NOISE_TABLE = [
    [int(number, 0) for number in line.split(",")]
    for line in Path(__file__).with_name("noise_table.csv").read_text().splitlines()[1:]
]


@pytest.mark.parametrize(("seed", "position", "token_id", "stream", "expected"), NOISE_TABLE)
def test_noise_table(seed: int, position: int, token_id: int, stream: int, expected: int) -> None:
    word = noise.words([seed], [position], token_id + 1, stream)[0, token_id]
    assert int(word) == philox_in_python(seed, position, token_id, stream)
    assert bits(float(noise.gumbel([seed], [position], token_id + 1, stream)[0, token_id])) == expected


def test_noise_words_equal_an_independent_philox() -> None:
    seeds, positions, vocab_size = [3, MAX_SEED, 1 << 63], [0, 2**31, 77], 1500
    words = noise.words(seeds, positions, vocab_size, stream=2).tolist()
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert words[row] == [philox_in_python(seed, position, v, 2) for v in range(vocab_size)]


def gumbel_in_numpy(word: int) -> np.float32:
    """The formulas of the design with numpy float32 scalars, one rounding per operation; log as in `float_math`."""
    one = np.float32(1)
    u = np.float32(word) * np.float32(2.0**-32) + np.float32(2.0**-33)
    if u < np.float32(2.0**-7):
        exponential = u * (one + u * (np.float32(0.5) + u / np.float32(3)))
    else:
        exponential = -log_in_numpy(one - min(u, np.float32(1 - 2.0**-24)))
    return -log_in_numpy(exponential)


def log_in_numpy(x: np.float32) -> np.float32:
    mantissa, exponent = math.frexp(float(x))  # [0.5, 1)
    if np.float32(mantissa) < np.uint32(0x3F3504F3).view(np.float32):
        mantissa, exponent = mantissa * 2, exponent - 1
    f, e = np.float32(mantissa) - np.float32(1), np.float32(exponent)
    y = np.float32(0)
    for coefficient in float_math.LOG_COEFFICIENTS:
        y = y * f + np.float32(coefficient)
    y = y * f * (f * f)
    y = y + e * np.float32(float_math.LN2_LOW) - np.float32(0.5) * (f * f)
    return (f + y) + e * np.float32(float_math.LN2_HIGH)


def test_gumbel_is_the_written_formula_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    edges = [0, 1, 2, 2**24, 2**25 - 2, 2**25 - 1, 2**25, 2**31, 2**32 - 2**8, 2**32 - 129, 2**32 - 128, 2**32 - 1]
    words = edges + rng.integers(0, 2**32, 2000).tolist() + rng.integers(0, 2**26, 500).tolist()
    got = noise.to_gumbel(torch.tensor(words))
    assert [bits(x) for x in got.tolist()] == [bits(float(gumbel_in_numpy(w))) for w in words]
    assert torch.isfinite(got).all()
    assert got.max() == pytest.approx(22.87, abs=0.01) and got.min() == pytest.approx(-2.811, abs=0.01)


def test_log_and_exp_are_within_one_ulp() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200_000, generator=generator) * 17 + 1e-9
    assert ulps(float_math.log(x.clone()), x.double().log()) < 1
    x = -torch.rand(200_000, generator=generator) * 86
    assert ulps(float_math.exp(x.clone()), x.double().exp()) < 1
    assert float_math.exp(torch.tensor([0.0, -torch.inf, -87.1])).tolist() == [1.0, 0.0, 0.0]


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    spacing = torch.nextafter(got.abs(), torch.tensor(torch.inf)) - got.abs()
    return float(((got.double() - exact).abs() / spacing.double()).max())


def test_gumbel_distribution() -> None:
    values = noise.gumbel(list(range(16)), [5] * 16, 4096).flatten().numpy()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-3
    uniform = noise.uniform([9], [5], 65536).flatten().numpy()
    assert stats.kstest(uniform, stats.uniform.cdf).pvalue > 1e-3


def test_a_row_of_noise_does_not_depend_on_the_others() -> None:
    alone = noise.gumbel([123456789], [42], 1000)[0]
    for num_rows in range(1, 71):
        row = num_rows // 2
        seeds = [(7919 * i) << 20 for i in range(num_rows)]
        positions = list(range(num_rows))
        seeds[row], positions[row] = 123456789, 42
        assert torch.equal(noise.gumbel(seeds, positions, 1000)[row], alone)


def test_rows_of_noise_may_be_columns_of_a_table() -> None:
    table = torch.tensor([[7919 * i << 20, 3 * i] for i in range(1, 10)])
    seeds, positions = table.T
    expected = noise.gumbel(seeds.tolist(), positions.tolist(), 300)
    assert torch.equal(noise.gumbel(seeds, positions, 300), expected)


@pytest.mark.parametrize("vocab_size", [1, 63, 256, 257, 1000, 1024, 1025, 4096])
def test_a_noise_value_does_not_depend_on_the_vocabulary_size(vocab_size: int) -> None:
    wide = noise.gumbel([11, MAX_SEED], [3, 900], 5000)
    narrow = noise.gumbel([11, MAX_SEED], [3, 900], vocab_size)
    assert narrow.shape == (2, vocab_size) and torch.equal(narrow, wide[:, :vocab_size])


def test_seeds_are_unsigned_and_every_bit_counts() -> None:
    as_bits = torch.tensor([-1, -(2**63)])
    assert torch.equal(noise.words(as_bits, [0, 0], 300), noise.words([MAX_SEED, 1 << 63], [0, 0], 300))
    rows = noise.words([1 << bit for bit in range(64)], [0] * 64, 8)
    assert len({tuple(row) for row in rows.tolist()}) == 64


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (([-1], [0], 8), "seed -1 is outside"),
        (([1 << 64], [0], 8), f"seed {1 << 64} is outside"),
        (([1, 2], [0], 8), "2 seeds but 1 positions"),
        (([1], [0], 0), "vocab_size must be at least 1"),
        ((torch.tensor([1.0]), [0], 8), "seeds must be"),
        ((torch.tensor([[1]]), [0], 8), "seeds must be"),
        (([1], torch.tensor([0.5]), 8), "positions must be"),
    ],
)
def test_bad_arguments_of_noise_are_rejected(arguments: tuple, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        noise.gumbel(*arguments)
