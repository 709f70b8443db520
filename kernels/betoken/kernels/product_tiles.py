"""Pieces of the row-independent products: the order of their sums, their tiles, and the sum over one range of K.

The order of every sum follows from [N, K] alone: `SumOrder` cuts K into ranges, a range is summed in steps of one tile
from low to high, and the ranges are added in order. The number of rows decides only how many rows share a tile.
Weights are the left operand, so that the matrix unit's fixed 64-row side holds outputs and the narrow one rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_OUTPUTS = 64
_BLOCK_INPUTS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 32}
_MIN_PROGRAMS = 128
"""Programs one row tile should give, so that small layers fill a large device. A constant, not the device's number of
processors: the order of the sums, and so the bits, must not change from device to device."""
_MIN_RANGE_BLOCKS = 4
_ROW_TILES = ((16, 4), (32, 4), (64, 3), (128, 2))
"""Rows of a tile, and loads in flight that fit 96 KiB of shared memory with it."""
_SUM_BLOCK = 256


class SumOrder(NamedTuple):
    """How the terms of one output are added up."""

    block_inputs: int
    """Terms of a step."""
    range_blocks: int
    """Steps of a range."""
    num_ranges: int

    @classmethod
    def of(cls, num_outputs: int, num_inputs: int, dtype: torch.dtype, group: int = 0) -> "SumOrder":
        """The number of rows does not enter. With a group, a step stays within one group of inputs."""
        most_inputs = block_inputs = _BLOCK_INPUTS[dtype]
        while group % block_inputs:
            block_inputs //= 2
        num_blocks = triton.cdiv(num_inputs, block_inputs)
        wanted = _MIN_PROGRAMS // triton.cdiv(num_outputs, BLOCK_OUTPUTS)
        num_ranges = max(1, min(wanted, num_blocks // (_MIN_RANGE_BLOCKS * most_inputs // block_inputs)))
        range_blocks = triton.cdiv(num_blocks, num_ranges)
        return cls(block_inputs, range_blocks, triton.cdiv(num_blocks, range_blocks))

    def is_even(self, num_inputs: int) -> bool:
        """Whether the ranges end exactly at the last input: no load needs a mask."""
        return num_inputs == self.block_inputs * self.range_blocks * self.num_ranges

    def new_sums(self, out: Tensor) -> Tensor:
        """The place of the products: [ranges, R, N] float32, or `out` [R, N] itself if there is one range."""
        if self.num_ranges == 1:
            return out
        return torch.empty(self.num_ranges, *out.shape, dtype=torch.float32, device=out.device)


def choose_row_tile(num_rows: int) -> tuple[int, int]:
    """Rows of a tile, and loads in flight, for a number of rows that meet the same weights."""
    return next((tile for tile in _ROW_TILES if num_rows <= tile[0]), _ROW_TILES[-1])


def add_ranges(sums: Tensor, bias: Tensor | None, bias_rows: Tensor | None, out: Tensor) -> None:
    """out [R, N] = the ranges of sums [ranges, R, N], and the bias [N] or row bias_rows[r] of the bias [E, N]."""
    num_ranges, num_rows, num_outputs = sums.shape
    _add_ranges[(num_rows, triton.cdiv(num_outputs, _SUM_BLOCK))](
        sums, bias, bias_rows, out, num_rows, num_outputs, NUM_RANGES=num_ranges, BLOCK=_SUM_BLOCK, num_warps=2
    )


@triton.jit
def sum_range(
    row_starts,  # [BLOCK_ROWS] pointers
    weight_ptr,  # [N, K] by its strides
    outputs,  # [BLOCK_OUTPUTS] int64; some may be beyond the last
    first_block,
    num_outputs,
    num_inputs,
    output_stride,
    input_stride,
    IS_TRANSPOSED: tl.constexpr,  # whether the weight's outputs are adjacent, rather than its inputs
    RANGE_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """[BLOCK_OUTPUTS, BLOCK_ROWS] float32: the sums over one range of K; of outputs beyond the last, of anything."""
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for step in range(RANGE_BLOCKS):
        inputs = ((first_block + step) * BLOCK_INPUTS + tl.arange(0, BLOCK_INPUTS)).to(tl.int64)
        is_inside = inputs < num_inputs
        places = row_starts[:, None] + inputs[None, :]
        if IS_EVEN:
            x = tl.load(places)
        else:
            x = tl.load(places, mask=is_inside[None, :], other=0.0)
        if IS_TRANSPOSED:  # read in memory order, and transposed in shared memory
            weight_places = weight_ptr + inputs[:, None] * input_stride + outputs[None, :] * output_stride
            is_weight = (outputs < num_outputs)[None, :]
            if not IS_EVEN:
                is_weight = is_weight & is_inside[:, None]
            weight = tl.trans(tl.load(weight_places, mask=is_weight, other=0.0))
        else:
            # Beyond the edge the last output is read again: no load needs a mask for it.
            weight_starts = weight_ptr + tl.minimum(outputs, num_outputs - 1) * output_stride
            weight_places = weight_starts[:, None] + inputs[None, :] * input_stride
            if IS_EVEN:
                weight = tl.load(weight_places)
            else:
                weight = tl.load(weight_places, mask=is_inside[None, :], other=0.0)
        if IN_FLOAT32:
            sums = tl.dot(weight.to(tl.float32), tl.trans(x.to(tl.float32)), sums, input_precision="ieee")
        else:
            sums = tl.dot(weight, tl.trans(x), sums)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _add_ranges(
    sums_ptr,  # [ranges, R, N] float32
    bias_ptr,  # [N], or [E, N] with rows named
    bias_rows_ptr,  # [R] int64, or None
    out_ptr,  # [R, N]
    num_rows,
    num_outputs,
    NUM_RANGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the ranges of one row in order."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = outputs < num_outputs
    total = tl.load(sums_ptr + row * num_outputs + outputs, mask=is_inside, other=0.0)
    for index in range(1, NUM_RANGES):
        place = (index * num_rows + row) * num_outputs + outputs
        total += tl.load(sums_ptr + place, mask=is_inside, other=0.0)
    if bias_ptr is not None:
        bias_places = bias_ptr + outputs
        if bias_rows_ptr is not None:
            bias_places += tl.load(bias_rows_ptr + row) * num_outputs
        total += tl.load(bias_places, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_outputs + outputs, total.to(out_ptr.dtype.element_ty), mask=is_inside)
