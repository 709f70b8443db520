"""Elementwise functions on rows that do not fill vectors: a row does not depend on other rows."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from betoken.engine.cpu.row_elementwise import WholeVectors, one_torch_thread

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": functional.elu,
    "exp2": torch.exp2,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "mish": functional.mish,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.01),
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "silu in place": lambda x: functional.silu(x.clone(), inplace=True),
    "softplus": functional.softplus,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_torch_thread():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 8, 48])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_of_elementwise_functions_do_not_depend_on_their_number(name: str, width: int, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    rows = (4 * torch.randn(300, width, generator=torch.Generator().manual_seed(0))).to(dtype)
    with WholeVectors():
        together = function(rows)
        for num_rows in (1, 3, 7):
            assert torch.equal(torch.cat([function(part) for part in rows.split(num_rows)]), together)
    torch.testing.assert_close(together, function(rows))
    assert together.dtype == dtype


def test_elementwise_functions_of_rows_that_fill_vectors_are_left_alone() -> None:
    with WholeVectors() as whole_vectors:
        functional.silu(torch.ones(3, 128))
        torch.rsqrt(torch.ones(3, 1))  # a norm's
        torch.sigmoid(torch.tensor(1.0))
        assert not whole_vectors.is_needed
        functional.silu(torch.ones(3, 8)[:, :4])
        assert whole_vectors.is_needed
