"""Triton kernel of the row sums; see the package for the contract. One program a row, one block width for all rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_BLOCK = 4096


def row_sum(x: Tensor) -> Tensor:
    """`betoken.kernels.row_sum.row_sum` for validated tensors."""
    num_rows, num_columns = x.shape
    out = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = min(_MAX_BLOCK, triton.next_power_of_2(num_columns))
    _row_sum[(num_rows,)](x, out, num_columns, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _row_sum(
    x_ptr,  # [R, K]
    out_ptr,  # [R]
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        place = start + columns
        sums += tl.load(x_ptr + row * num_columns + place, mask=place < num_columns, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(sums, axis=0))
