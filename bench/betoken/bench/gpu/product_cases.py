"""Cases of the row-independent products: the linear layers of a Llama-3-8B, a Mixtral's experts, the sums of norms."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from betoken.bench.gpu.case import Arguments, Case, Side
from betoken.kernels.expert_linear import expert_linear
from betoken.kernels.linear import linear
from betoken.kernels.row_sum import row_sum

LAYERS = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
"""[N, K]: key or value, query or output, gate or up, down, output embedding."""
EXPERTS = ((8, 14336, 4096), (8, 4096, 14336))
"""[E, N, K]: gate or up, down; as in a Mixtral-8x7B."""
_DTYPE = torch.bfloat16


def product_cases(
    device: torch.device,
    layers: Sequence[tuple[int, int]] = LAYERS,
    experts: Sequence[tuple[int, int, int]] = EXPERTS,
) -> Iterator[Case]:
    """Every case of this file."""
    for num_outputs, num_inputs in layers:
        for num_rows in (1, 5, 64):
            yield _linear_case(device, num_rows, num_outputs, num_inputs)
    for shape in experts:
        yield _experts_case(device, 32, shape)
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


def _experts_case(device: torch.device, num_slots: int, shape: tuple[int, int, int]) -> Case:
    """The same number of slots for each expert, in turn."""
    num_experts, num_outputs, num_inputs = shape

    def fresh() -> Arguments:
        x = torch.randn(num_slots, num_inputs, device=device).to(_DTYPE)
        weight = torch.randn(shape, device=device, dtype=_DTYPE).mul_(num_inputs**-0.5)
        return (x, weight, torch.arange(num_slots, device=device) % num_experts)

    def run(x: Tensor, weight: Tensor, expert_ids: Tensor) -> tuple[Tensor]:
        return (expert_linear(x, weight, None, expert_ids),)

    def grouped(x: Tensor, weight: Tensor, expert_ids: Tensor) -> Tensor:
        sorted_ids, slots = expert_ids.sort(stable=True)
        ends = torch.searchsorted(sorted_ids, torch.arange(1, num_experts + 1, device=device), out_int32=True)
        return functional.grouped_mm(x[slots], weight.transpose(1, 2), offs=ends)

    num_visited = min(num_slots, num_experts)
    return Case(
        op="expert_linear",
        shape=f"S={num_slots} E={num_experts} N={num_outputs} K={num_inputs} bfloat16",
        num_bytes=2 * (num_visited * num_outputs * num_inputs + num_slots * (num_outputs + num_inputs)) + 8 * num_slots,
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,
        others=[Side("torch eager (grouped_mm)", grouped)],
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
