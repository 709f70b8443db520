"""Cases of the row-independent products: the linear layers of a Llama-3-8B, and the sums of its norms."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.bench.gpu.case import Arguments, Case, Side
from foretoken.kernels.linear import linear
from foretoken.kernels.row_sum import row_sum

LAYERS = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
"""[N, K]: key or value, query or output, gate or up, down, output embedding."""
_DTYPE = torch.bfloat16


def product_cases(device: torch.device, layers: Sequence[tuple[int, int]] = LAYERS) -> Iterator[Case]:
    """Every case of this file."""
    for num_outputs, num_inputs in layers:
        for num_rows in (1, 5, 64):
            yield _linear_case(device, num_rows, num_outputs, num_inputs)
    yield _sum_case(device, num_rows=64, num_columns=layers[0][1])


def _linear_case(device: torch.device, num_rows: int, num_outputs: int, num_inputs: int) -> Case:
    def fresh() -> Arguments:
        x = torch.randn(num_rows, num_inputs, device=device).to(_DTYPE)
        weight = (torch.randn(num_outputs, num_inputs, device=device) * num_inputs**-0.5).to(_DTYPE)
        return (x, weight)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor]:
        return (linear(x, weight),)

    return Case(
        op="linear",
        shape=f"R={num_rows} N={num_outputs} K={num_inputs} bfloat16",
        num_bytes=2 * (num_outputs * num_inputs + num_rows * (num_outputs + num_inputs)),
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,  # both round once, from float32 sums in different orders
        others=[Side("torch eager (cuBLAS)", functional.linear)],
    )


def _sum_case(device: torch.device, num_rows: int, num_columns: int) -> Case:
    def fresh() -> Arguments:
        return (torch.randn(num_rows, num_columns, device=device).square(),)

    def run(x: Tensor) -> tuple[Tensor]:
        return (row_sum(x),)

    return Case(
        op="row_sum",
        shape=f"R={num_rows} K={num_columns} float32",
        num_bytes=4 * num_rows * (num_columns + 1),
        fresh=fresh,
        run=run,
        tolerance=num_columns * torch.finfo(torch.float32).eps,
        others=[Side("torch eager", lambda x: x.sum(dim=1))],
    )
