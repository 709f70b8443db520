"""The interpreter's product is the sum of its terms in order; no row depends on how many there are."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(a, b, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, terms = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + rows[:, None] * K + terms)
    right = tl.load(b + terms[:, None] * N + columns)
    tl.store(out + rows[:, None] * N + columns, tl.dot(left, right, input_precision="ieee"))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.full((a.shape[0], b.shape[1]), float("nan"))
    multiply[(1,)](a, b, out, a.shape[0], b.shape[1], a.shape[1])
    return out


@pytest.mark.parametrize(("k", "n"), [(16, 16), (64, 16), (64, 64), (128, 32), (256, 64)])
def test_a_row_of_a_product_is_its_terms_in_order(k: int, n: int) -> None:
    generator = torch.Generator().manual_seed(k + n)
    a, b = torch.randn(32, k, generator=generator), torch.randn(k, n, generator=generator)
    whole = product(a, b)
    for num_rows in (1, 2, 4, 16):
        assert torch.equal(product(a[:num_rows].contiguous(), b), whole[:num_rows])
    total = np.float32(0)
    for left, right in zip(a[5].numpy(), b[:, 3].numpy(), strict=True):
        total += left * right
    assert whole[5, 3] == float(total)


def test_half_precision_is_multiplied_in_float32() -> None:
    a, b = torch.full((16, 64), 1 / 3).to(torch.float16), torch.full((64, 16), 3e-3).to(torch.float16)
    assert torch.equal(product(a, b), product(a.float(), b.float()))
