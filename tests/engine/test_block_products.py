"""Products without our kernels: a row does not depend on other rows."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from betoken.engine.cpu.row_elementwise import one_torch_thread
from betoken.engine.reference.block_linear import BlockProducts


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_outputs", [4, 16, 101])
def test_rows_of_a_block_product_do_not_depend_on_their_number(
    num_outputs: int, dtype: torch.dtype, has_bias: bool
) -> None:
    """A router's and a head's numbers of outputs, and one at which torch's own products of half types differ."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(104, 64, generator=generator).to(dtype)
    weight = (0.15 * torch.randn(num_outputs, 64, generator=generator)).to(dtype)
    bias = torch.randn(num_outputs, generator=generator).to(dtype) if has_bias else None
    with BlockProducts():
        together = functional.linear(rows[None], weight, bias)[0]
        for num_rows in (1, 3, 8, 40):
            parts = [functional.linear(part, weight, bias) for part in torch.split(rows, num_rows)]
            assert torch.equal(torch.cat(parts), together)
    torch.testing.assert_close(together, functional.linear(rows, weight, bias), rtol=2e-2, atol=2e-2)
