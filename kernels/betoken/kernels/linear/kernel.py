"""Triton kernel of the row-independent linear layer; see the package for the contract, `product_tiles` for its sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from betoken.kernels.product_tiles import BLOCK_OUTPUTS, SumOrder, add_ranges, choose_row_tile, sum_range


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, keeps_sums: bool, whole_outputs: int) -> Tensor:
    """`betoken.kernels.linear.linear` for validated tensors."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    order = SumOrder.of(whole_outputs or num_outputs, num_inputs, x.dtype)
    block_rows, num_stages = choose_row_tile(num_rows)
    dtype = torch.float32 if keeps_sums else x.dtype
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    sums = order.new_sums(out)
    # Row tiles vary fastest: programs that read the same weights run together.
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_outputs, BLOCK_OUTPUTS), order.num_ranges)
    _product[grid](
        x,
        weight,
        bias if order.num_ranges == 1 else None,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
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
        add_ranges(sums, bias, None, out)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,  # [R, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], or None
    sums_ptr,  # [ranges, R, N] float32, or [R, N] of the result's type when there is one range
    num_rows,
    num_outputs,
    num_inputs,
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
    sums = sum_range(
        x_ptr + tl.minimum(rows, num_rows - 1) * num_inputs,
        weight_ptr,
        outputs,
        index * RANGE_BLOCKS,
        num_outputs,
        num_inputs,
        num_inputs,
        1,
        False,
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
