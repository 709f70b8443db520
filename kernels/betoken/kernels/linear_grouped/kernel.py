"""Triton kernel of the product by a weight of few bits; see the package for the contract, `tiles` for its sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.linear_grouped.tiles import Tiles, sum_grouped_range
from betoken.kernels.linear_grouped.weight import Grouped
from betoken.kernels.product_tiles import BLOCK_OUTPUTS, add_ranges, choose_row_tile


def linear_grouped(x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, whole_outputs: int) -> Tensor:
    """`betoken.kernels.linear_grouped.linear_grouped` for validated tensors."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    tiles = Tiles.of(weight, whole_outputs or num_outputs, x.dtype)
    block_rows, num_stages = choose_row_tile(num_rows)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    sums = tiles.order.new_sums(out)
    # Row tiles vary fastest: programs that read the same weights run together.
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_outputs, BLOCK_OUTPUTS), tiles.order.num_ranges)
    _product[grid](
        x,
        *tiles.tensors,
        bias if tiles.order.num_ranges == 1 else None,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        **tiles.constants,
        BLOCK_ROWS=block_rows,
        num_warps=4,
        num_stages=num_stages,
    )
    if tiles.order.num_ranges > 1:
        add_ranges(sums, bias, None, out)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,  # [R, K]
    values_ptr,  # the weight's tensors, see `Grouped`; bytes unless they are floats
    high_ptr,
    scales_ptr,
    scale_units_ptr,
    zeros_ptr,
    offsets_ptr,
    offset_units_ptr,
    table_ptr,  # [16] float32, or None
    bias_ptr,  # [N], or None
    sums_ptr,  # [ranges, R, N] float32, or [R, N] of the result's type when there is one range
    num_rows,
    num_outputs,
    num_inputs,
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
    """One tile [BLOCK_OUTPUTS, BLOCK_ROWS] of one range of K."""
    index = tl.program_id(2)
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    outputs = (tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    # Beyond the edge the last row is read again: its results are not stored, and no load needs a mask for it.
    sums = sum_grouped_range(
        x_ptr + tl.minimum(rows, num_rows - 1) * num_inputs,
        values_ptr,
        high_ptr,
        scales_ptr,
        scale_units_ptr,
        zeros_ptr,
        offsets_ptr,
        offset_units_ptr,
        table_ptr,
        tl.minimum(outputs, num_outputs - 1),
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
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    places = (index.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + outputs[:, None]
    is_stored = (outputs[:, None] < num_outputs) & (rows[None, :] < num_rows)
    tl.store(sums_ptr + places, sums.to(sums_ptr.dtype.element_ty), mask=is_stored)
