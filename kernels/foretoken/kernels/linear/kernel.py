"""Triton kernel of the row-independent linear layer; see the package for the contract.

The order of every sum follows from [N, K] alone: `_split` cuts K into ranges, a range is summed in steps of one
tile from low to high, and the ranges are added in order. The number of rows decides only how many rows share a tile.
Weights are the left operand, so that the matrix unit's fixed 64-row side holds outputs and the narrow one rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_BLOCK_OUTPUTS = 64
_BLOCK_INPUTS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
_MIN_PROGRAMS = 128
"""Programs one row tile should give, so that small layers fill a large device. A constant, not the device's number of
processors: the order of the sums, and so the bits, must not change from device to device."""
_MIN_SPLIT_BLOCKS = 4
_ROW_TILES = ((16, 4), (32, 4), (64, 3), (128, 2))
"""Rows of a tile, and loads in flight that fit 96 KiB of shared memory with it."""
_SUM_BLOCK = 256


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`foretoken.kernels.linear.linear` for validated tensors."""
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0]
    block_inputs = _BLOCK_INPUTS[x.dtype]
    num_splits, split_blocks = _split(num_outputs, num_inputs, block_inputs)
    block_rows, num_stages = next((tile for tile in _ROW_TILES if num_rows <= tile[0]), _ROW_TILES[-1])
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    sums = out if num_splits == 1 else torch.empty(num_splits, num_rows, num_outputs, device=x.device)
    # Row tiles vary fastest: programs that read the same weights run together.
    grid = (triton.cdiv(num_rows, block_rows), triton.cdiv(num_outputs, _BLOCK_OUTPUTS), num_splits)
    _product[grid](
        x,
        weight,
        bias,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        SPLIT_BLOCKS=split_blocks,
        HAS_BIAS=bias is not None and num_splits == 1,
        IS_EVEN=num_inputs % (block_inputs * split_blocks * num_splits) == 0,
        # The interpreter has no product of bfloat16: their float32 products are the same numbers.
        IN_FLOAT32=x.dtype == torch.float32 or isinstance(_product, InterpretedFunction),
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_INPUTS=block_inputs,
        num_warps=4,
        num_stages=num_stages,
    )
    if num_splits > 1:
        _add_splits[(num_rows, triton.cdiv(num_outputs, _SUM_BLOCK))](
            sums,
            bias,
            out,
            num_rows,
            num_outputs,
            NUM_SPLITS=num_splits,
            HAS_BIAS=bias is not None,
            BLOCK=_SUM_BLOCK,
            num_warps=2,
        )
    return out


def _split(num_outputs: int, num_inputs: int, block_inputs: int) -> tuple[int, int]:
    """Number of ranges of K, and tiles in each; the rows have no say."""
    num_blocks = triton.cdiv(num_inputs, block_inputs)
    wanted = _MIN_PROGRAMS // triton.cdiv(num_outputs, _BLOCK_OUTPUTS)
    num_splits = max(1, min(wanted, num_blocks // _MIN_SPLIT_BLOCKS))
    split_blocks = triton.cdiv(num_blocks, num_splits)
    return triton.cdiv(num_blocks, split_blocks), split_blocks


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    x_ptr,  # [R, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N]
    sums_ptr,  # [splits, R, N] float32, or [R, N] of the result's type when there is one split
    num_rows,
    num_outputs,
    num_inputs,
    SPLIT_BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """One tile [BLOCK_OUTPUTS, BLOCK_ROWS] of one range of K."""
    split = tl.program_id(2)
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    outputs = (tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)).to(tl.int64)
    # Beyond the edge the last row is read again: its results are not stored, and no load needs a mask for it.
    row_starts = x_ptr + tl.minimum(rows, num_rows - 1) * num_inputs
    weight_starts = weight_ptr + tl.minimum(outputs, num_outputs - 1) * num_inputs
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for step in range(SPLIT_BLOCKS):
        inputs = (split * SPLIT_BLOCKS + step) * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)
        if IS_EVEN:
            weight = tl.load(weight_starts[:, None] + inputs[None, :])
            x = tl.load(row_starts[:, None] + inputs[None, :])
        else:
            is_inside = inputs[None, :] < num_inputs
            weight = tl.load(weight_starts[:, None] + inputs[None, :], mask=is_inside, other=0.0)
            x = tl.load(row_starts[:, None] + inputs[None, :], mask=is_inside, other=0.0)
        if IN_FLOAT32:
            sums = tl.dot(weight.to(tl.float32), tl.trans(x.to(tl.float32)), sums, input_precision="ieee")
        else:
            sums = tl.dot(weight, tl.trans(x), sums)
    is_stored = (outputs[:, None] < num_outputs) & (rows[None, :] < num_rows)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
    places = (split.to(tl.int64) * num_rows + rows[None, :]) * num_outputs + outputs[:, None]
    tl.store(sums_ptr + places, sums.to(sums_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    sums_ptr,  # [splits, R, N] float32
    bias_ptr,  # [N]
    out_ptr,  # [R, N]
    num_rows,
    num_outputs,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the ranges of one row in order."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = outputs < num_outputs
    total = tl.load(sums_ptr + row * num_outputs + outputs, mask=is_inside, other=0.0)
    for split in range(1, NUM_SPLITS):
        place = (split * num_rows + row) * num_outputs + outputs
        total += tl.load(sums_ptr + place, mask=is_inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + outputs, total.to(out_ptr.dtype.element_ty), mask=is_inside)
