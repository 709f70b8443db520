"""Products of experts' routers, which no linear layer owns: a row by itself, whatever type the router multiplies in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from betoken.engine.cpu.experts import BareProducts
from betoken.kernels.cpu import load_cpu_kernels

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weight: weight,
    "float": lambda weight: weight.float(),
    "to": lambda weight: weight.to(torch.float32),
    "type": lambda weight: weight.type(torch.float32),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_the_product_of_an_experts_router_does_not_depend_on_the_number_of_rows(name: str, dtype: torch.dtype) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no C++ compiler: there is nothing to redirect to")
    cast, generator = CASTS[name], torch.Generator().manual_seed(0)
    router = nn.Module()
    router.weight = nn.Parameter(torch.randn(32, 1024, generator=generator).to(dtype), requires_grad=False)
    rows = torch.randn(40, 1024, generator=generator).to(cast(router.weight).dtype)
    bare_products = BareProducts(router)
    with bare_products:
        together = functional.linear(rows, cast(router.weight))
        for num_rows in (1, 2, 5, 16, 33):
            alone = functional.linear(rows[:num_rows], cast(router.weight))
            assert torch.equal(alone, together[:num_rows])
    assert bare_products.num_redirected == 1
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[together.dtype]
    torch.testing.assert_close(
        together, functional.linear(rows, cast(router.weight)), rtol=tolerance, atol=30 * tolerance
    )
