"""Cases of the row-independent products: the linear layers of a Llama-3-8B, dense and of few bits, a Mixtral's experts,
the sums of norms.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from betoken.bench.gpu.case import Arguments, Case, Side
from betoken.bench.gpu.marlin import marlin_side
from betoken.bench.gpu.step_models import rounded_weight
from betoken.kernels.expert_linear import expert_linear
from betoken.kernels.linear import linear
from betoken.kernels.linear_grouped import Grouped, linear_grouped
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
    for weights in ("w4a16", "w8a16", "fp8"):
        for num_outputs, num_inputs in layers[:-1] if len(layers) > 1 else layers:  # output layers stay dense
            for num_rows in (1, 5, 64):
                yield _grouped_case(device, weights, num_rows, num_outputs, num_inputs)
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


def _grouped_case(device: torch.device, weights: str, num_rows: int, num_outputs: int, num_inputs: int) -> Case:
    def fresh() -> Arguments:
        x = torch.randn(num_rows, num_inputs, device=device).to(_DTYPE)
        dense = (torch.randn(num_outputs, num_inputs, device=device) * num_inputs**-0.5).to(_DTYPE)
        return (x, rounded_weight(weights, dense), dense)

    def run(x: Tensor, weight: Grouped, dense: Tensor) -> tuple[Tensor]:
        return (linear_grouped(x, weight),)

    weight = rounded_weight(weights, torch.empty(num_outputs, num_inputs, dtype=_DTYPE, device="meta"))
    return Case(
        op="linear_grouped",
        shape=f"{weights} R={num_rows} N={num_outputs} K={num_inputs}",
        num_bytes=weight.num_bytes + 2 * num_rows * (num_outputs + num_inputs),
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,
        others=[
            Side("torch eager (cuBLAS, bfloat16 weights)", lambda x, weight, dense: functional.linear(x, dense)),
            *_packed_sides(weights),
        ],
    )


def _packed_sides(weights: str) -> list[Side]:
    """torch's own operator for such weights, and Marlin's; packing runs at the first call, which is not timed."""
    packed: dict[int, tuple[Tensor, ...]] = {}

    def eights(x: Tensor, weight: Grouped, dense: Tensor) -> object:
        return torch.ops.aten._weight_int8pack_mm(x, weight.values, weight.scales[:, 0].to(_DTYPE))

    def fours(x: Tensor, weight: Grouped, dense: Tensor) -> object:
        if id(weight) not in packed:
            swapped = weight.values << 4 | weight.values >> 4  # its first of two is in the high half
            scales = torch.stack([weight.scales, torch.zeros_like(weight.scales)], -1).transpose(0, 1).to(_DTYPE)
            packed[id(weight)] = (torch.ops.aten._convert_weight_to_int4pack(swapped, 8), scales.contiguous())
        return torch.ops.aten._weight_int4pack_mm(x, packed[id(weight)][0], 128, packed[id(weight)][1])

    def floats(x: Tensor, weight: Grouped, dense: Tensor) -> object:
        one = torch.ones((), device=x.device)
        return torch._scaled_mm(x.to(torch.float8_e4m3fn), weight.values.T, one, one, out_dtype=_DTYPE)

    return {
        "w4a16": [Side("torch _weight_int4pack_mm", fours), marlin_side()],
        "w8a16": [Side("torch _weight_int8pack_mm", eights)],
        "fp8": [Side("torch _scaled_mm (rows rounded to FP8 too, one scale)", floats)],
    }[weights]


def _experts_case(device: torch.device, num_slots: int, shape: tuple[int, int, int]) -> Case:
    """Equal numbers of slots for each expert, in turn."""
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
