"""Triton kernels of the experts' linear layers; see the package for the contract, `product_tiles` for its sums.

Slots (rows of x) are sorted by expert on the device, and each expert's range of them is cut into tiles. The host knows
only how many tiles there are at most: programs beyond the last leave at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from betoken.kernels.product_tiles import BLOCK_OUTPUTS, SumOrder, add_ranges, choose_row_tile, sum_range


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, whole_outputs: int) -> Tensor:
    """`betoken.kernels.expert_linear.expert_linear` for validated tensors."""
    num_slots, num_inputs = x.shape
    num_experts, num_outputs, _ = weight.shape
    order = SumOrder.of(whole_outputs or num_outputs, num_inputs, x.dtype)
    block_rows, num_stages = choose_row_tile(triton.cdiv(num_slots, num_experts))  # visitors of an expert, on average
    out = torch.empty(num_slots, num_outputs, dtype=x.dtype, device=x.device)
    sums = order.new_sums(out)
    slots, slot_starts, tile_ends = sort_slots(expert_ids, num_experts, block_rows)
    # No expert has more tiles than slots, nor more than one tile that is not full.
    num_tiles = min(num_slots, num_slots // block_rows + num_experts)
    # Tiles vary fastest: programs that read the same weights run together.
    grid = (num_tiles, triton.cdiv(num_outputs, BLOCK_OUTPUTS), order.num_ranges)
    _product[grid](
        x,
        weight,
        bias if order.num_ranges == 1 else None,
        sums,
        slots,
        slot_starts,
        tile_ends,
        num_slots,
        num_outputs,
        num_inputs,
        *weight.stride(),
        NUM_EXPERTS=num_experts,
        BLOCK_EXPERTS=len(tile_ends),
        IS_TRANSPOSED=weight.stride(1) < weight.stride(2),
        RANGE_BLOCKS=order.range_blocks,
        IS_EVEN=order.is_even(num_inputs),
        # The interpreter has no product of bfloat16: their float32 products are the same numbers.
        IN_FLOAT32=x.dtype == torch.float32 or isinstance(_product, InterpretedFunction),
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=BLOCK_OUTPUTS,
        BLOCK_INPUTS=order.block_inputs,
        num_warps=4,
        num_stages=num_stages,
    )
    if order.num_ranges > 1:
        add_ranges(sums, bias, expert_ids, out)
    return out


def sort_slots(expert_ids: Tensor, num_experts: int, block_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slots [S] by expert; expert e has the slots [slot_starts[e], slot_starts[e + 1]) and tiles up to tile_ends[e]."""
    sorted_ids, slots = torch.sort(expert_ids, stable=True)
    block_experts = triton.next_power_of_2(num_experts + 1)
    slot_starts, tile_ends = torch.empty(2, block_experts, dtype=torch.int32, device=expert_ids.device)
    _cut_tiles[(1,)](
        sorted_ids,
        slot_starts,
        tile_ends,
        len(slots),
        triton.next_power_of_2(len(slots)),
        BLOCK_ROWS=block_rows,
        BLOCK_EXPERTS=block_experts,
        num_warps=4,
    )
    return slots, slot_starts, tile_ends


@triton.jit
def _count_below(sorted_ids_ptr, bounds, num_slots, largest_step):
    """How many of the sorted ids are below each bound."""
    counts = bounds * 0
    step = largest_step
    while step > 0:
        more = counts + step
        can_be = more <= num_slots
        last = tl.load(sorted_ids_ptr + more - 1, mask=can_be, other=0).to(tl.int32)
        counts = tl.where(can_be & (last < bounds), more, counts)
        step = step // 2
    return counts


@triton.jit(do_not_specialize=["num_slots", "largest_step"])
def _cut_tiles(
    sorted_ids_ptr,  # [S] int64
    slot_starts_ptr,  # [BLOCK_EXPERTS] int32
    tile_ends_ptr,  # [BLOCK_EXPERTS] int32
    num_slots,
    largest_step,  # power of two, at least S
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
):
    """Experts beyond the last have no slot and no tile."""
    experts = tl.arange(0, BLOCK_EXPERTS)
    starts = _count_below(sorted_ids_ptr, experts, num_slots, largest_step)
    ends = _count_below(sorted_ids_ptr, experts + 1, num_slots, largest_step)
    tl.store(slot_starts_ptr + experts, starts)
    tl.store(tile_ends_ptr + experts, tl.cumsum((ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0))


@triton.jit
def find_tile(slot_starts_ptr, tile_ends_ptr, tile, BLOCK_EXPERTS: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """The expert of a tile, one beyond the last if there is none, and its range [begin, end) of the sorted slots."""
    tile_ends = tl.load(tile_ends_ptr + tl.arange(0, BLOCK_EXPERTS))
    is_before = tile_ends <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    first_tile = tl.max(tl.where(is_before, tile_ends, 0), 0)
    inside = tl.minimum(expert, BLOCK_EXPERTS - 2)
    begin = tl.load(slot_starts_ptr + inside) + (tile - first_tile) * BLOCK_ROWS
    end = tl.load(slot_starts_ptr + inside + 1)
    return expert, begin, end


@triton.jit(do_not_specialize=["num_slots"])
def _product(
    x_ptr,  # [S, K]
    weight_ptr,  # [E, N, K] by its strides
    bias_ptr,  # [E, N], or None
    sums_ptr,  # [ranges, S, N] float32, or [S, N] of the result's type when there is one range
    slots_ptr,  # [S] int64, by expert
    slot_starts_ptr,  # [BLOCK_EXPERTS] int32
    tile_ends_ptr,  # [BLOCK_EXPERTS] int32
    num_slots,
    num_outputs,
    num_inputs,
    expert_stride,
    output_stride,
    input_stride,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
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
    sums = sum_range(
        x_ptr + slots * num_inputs,
        weight_ptr + expert.to(tl.int64) * expert_stride,
        outputs,
        index * RANGE_BLOCKS,
        num_outputs,
        num_inputs,
        output_stride,
        input_stride,
        IS_TRANSPOSED,
        RANGE_BLOCKS,
        IS_EVEN,
        IN_FLOAT32,
        BLOCK_ROWS,
        BLOCK_OUTPUTS,
        BLOCK_INPUTS,
    )
    if bias_ptr is not None:
        bias_places = bias_ptr + expert.to(tl.int64) * num_outputs + outputs
        sums += tl.load(bias_places, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    out_places = (index.to(tl.int64) * num_slots + slots[None, :]) * num_outputs + outputs[:, None]
    is_stored = (outputs[:, None] < num_outputs) & (places[None, :] < end)
    tl.store(sums_ptr + out_places, sums.to(sums_ptr.dtype.element_ty), mask=is_stored)
