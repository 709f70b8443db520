"""The short convolution in Triton: one program a row and block of channels."""

import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.rows import PagedRows
from betoken.kernels.triton_math import EXACT

_BLOCK = 512


def short_conv_triton(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: PagedRows) -> Tensor:
    """See `betoken.kernels.short_conv.short_conv`."""
    num_rows, num_channels = len(rows.positions), inputs.shape[2]
    out = inputs.new_empty(num_rows, num_channels)
    if num_rows == 0 or num_channels == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(num_channels))
    paths = (rows.paths.starts, rows.paths.slots) if rows.paths else (rows.positions, rows.positions)
    _convolve[(num_rows, triton.cdiv(num_channels, block))](
        inputs,
        weight,
        weight if bias is None else bias,
        out,
        rows.positions,
        rows.row_segments,
        rows.page_starts,
        rows.page_ids,
        *paths,
        NUM_CHANNELS=num_channels,
        NUM_TAPS=len(weight),
        PAGE_SIZE=inputs.shape[1],
        BLOCK=block,
        HAS_BIAS=bias is not None,
        HAS_TREES=rows.paths is not None,
        num_warps=4,
        **EXACT,
    )
    return out


@triton.jit
def _convolve(
    inputs,  # [pages, PAGE_SIZE, C]
    weight,  # [L, C]
    bias,  # [C], read when HAS_BIAS only
    out,  # [R, C]
    positions,  # [R]
    row_segments,  # [R]
    page_starts,  # [S + 1]
    page_ids,
    path_starts,  # [R + 1]; the paths are read when HAS_TREES only
    path_slots,
    NUM_CHANNELS: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at < NUM_CHANNELS
    position = tl.load(positions + row)
    page_start = tl.load(page_starts + tl.load(row_segments + row))
    total = tl.zeros([BLOCK], tl.float32)
    for tap in range(NUM_TAPS):
        before = position - (NUM_TAPS - 1) + tap
        is_there = before >= 0
        slot = tl.maximum(before, 0)
        if HAS_TREES:
            path_end = tl.load(path_starts + row + 1)
            from_end = path_end - 1 - (position - before)
            on_path = is_there & (from_end >= tl.load(path_starts + row))
            slot = tl.where(on_path, tl.load(path_slots + from_end, mask=on_path, other=0), slot)
        page = tl.load(page_ids + page_start + slot // PAGE_SIZE).to(tl.int64)
        place = (page * PAGE_SIZE + slot % PAGE_SIZE) * NUM_CHANNELS
        seen = tl.load(inputs + place + at, mask=is_channel & is_there, other=0.0).to(tl.float32)
        total += seen * tl.load(weight + tap * NUM_CHANNELS + at, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + row * NUM_CHANNELS + at, total.to(out.dtype.element_ty), mask=is_channel)
