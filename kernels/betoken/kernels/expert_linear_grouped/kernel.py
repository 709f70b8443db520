"""Triton kernel of the experts' products by weights of few bits; see the package for the contract.

Slots are sorted and cut into tiles as `expert_linear` does; `linear_grouped.tiles` adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.expert_linear.kernel import find_tile, sort_slots
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.tiles import Tiles, sum_grouped_range
from betoken.kernels.product_tiles import BLOCK_OUTPUTS, add_ranges, choose_row_tile


def expert_linear_grouped(
    x: Tensor, weight: Grouped, bias: Tensor | None, expert_ids: Tensor, num: int, whole_outputs: int
) -> Tensor:
    """`betoken.kernels.expert_linear_grouped.expert_linear_grouped` for validated tensors."""
    num_slots, num_inputs = x.shape
    num_outputs = weight.shape[0] // num
    tiles = Tiles.of(weight, whole_outputs or num_outputs, x.dtype)
    block_rows, num_stages = choose_row_tile(triton.cdiv(num_slots, num))  # visitors of an expert, on average
    out = torch.empty(num_slots, num_outputs, dtype=x.dtype, device=x.device)
    sums = tiles.order.new_sums(out)
    slots, slot_starts, tile_ends = sort_slots(expert_ids, num, block_rows)
    # No expert has more tiles than slots, nor more than one tile that is not full.
    num_tiles = min(num_slots, num_slots // block_rows + num)
    # Tiles vary fastest: programs that read the same weights run together.
    grid = (num_tiles, triton.cdiv(num_outputs, BLOCK_OUTPUTS), tiles.order.num_ranges)
    _product[grid](
        x,
        *tiles.tensors,
        bias if tiles.order.num_ranges == 1 else None,
        sums,
        slots,
        slot_starts,
        tile_ends,
        num_slots,
        num_outputs,
        num_inputs,
        NUM_EXPERTS=num,
        BLOCK_EXPERTS=len(tile_ends),
        **tiles.constants,
        BLOCK_ROWS=block_rows,
        num_warps=4,
        num_stages=num_stages,
    )
    if tiles.order.num_ranges > 1:
        add_ranges(sums, bias, expert_ids, out)
    return out


@triton.jit(do_not_specialize=["num_slots"])
def _product(
    x_ptr,  # [S, K]
    values_ptr,  # the tensors of the weights [E * N, K], see `Grouped`; bytes unless they are floats
    high_ptr,
    scales_ptr,
    scale_units_ptr,
    zeros_ptr,
    offsets_ptr,
    offset_units_ptr,
    table_ptr,  # [16] float32, or None
    bias_ptr,  # [E, N], or None
    sums_ptr,  # [ranges, S, N] float32, or [S, N] of the result's type when there is one range
    slots_ptr,  # [S] int64, by expert
    slot_starts_ptr,  # [BLOCK_EXPERTS] int32
    tile_ends_ptr,  # [BLOCK_EXPERTS] int32
    num_slots,
    num_outputs,
    num_inputs,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANGE_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One tile [BLOCK_OUTPUTS, BLOCK_ROWS] of one range of K of one expert."""
    expert, begin, end = find_tile(slot_starts_ptr, tile_ends_ptr, tl.program_id(0), BLOCK_EXPERTS, BLOCK_ROWS)
    if expert >= NUM_EXPERTS:
        return
    places = begin + tl.arange(0, BLOCK_ROWS)
    # Beyond the edge the last row is read again: its results are not stored, and no load needs a mask for it.
    slots = tl.load(slots_ptr + tl.minimum(places, end - 1))
    index = tl.program_id(2)
    outputs = (tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    first_row = expert.to(tl.int64) * num_outputs
    sums = sum_grouped_range(
        x_ptr + slots * num_inputs,
        values_ptr,
        high_ptr,
        scales_ptr,
        scale_units_ptr,
        zeros_ptr,
        offsets_ptr,
        offset_units_ptr,
        table_ptr,
        first_row + tl.minimum(outputs, num_outputs - 1),
        index * RANGE_BLOCKS,
        num_inputs,
        KIND,
        SCALES,
        ZERO,
        GROUP,
        FACTOR,
        NUM_PARTS,
        RANGE_BLOCKS,
        IS_EVEN,
        IN_FLOAT32,
        BLOCK_ROWS,
        BLOCK_OUTPUTS,
        BLOCK_INPUTS,
    )
    if bias_ptr is not None:
        bias_places = bias_ptr + first_row + outputs
        sums += tl.load(bias_places, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_places = (index.to(tl.int64) * num_slots + slots[None, :]) * num_outputs + outputs[:, None]
    is_stored = (outputs[:, None] < num_outputs) & (places[None, :] < end)
    tl.store(sums_ptr + out_places, sums.to(sums_ptr.dtype.element_ty), mask=is_stored)
