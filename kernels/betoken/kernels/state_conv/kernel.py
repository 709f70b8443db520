"""The convolution over rings in Triton: one program a row and block of channels; a second kernel stores the inputs."""

import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.state_rows import StateRows
from betoken.kernels.triton_math import EXACT

_BLOCK = 512


def state_conv_triton(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: StateRows) -> Tensor:
    """See `betoken.kernels.state_conv.state_conv`."""
    num_rows, num_channels = x.shape
    x = x.contiguous()
    out = x.new_empty(x.shape)
    if num_rows == 0 or num_channels == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(num_channels))
    paths = (rows.paths.starts, rows.paths.slots) if rows.paths else (rows.positions, rows.positions)
    row_starts = rows.row_starts()
    places = (rows.row_segments, row_starts, rows.states, rows.first_slots)
    grid = (num_rows, triton.cdiv(num_channels, block))
    sizes = {"NUM_CHANNELS": num_channels, "RING": ring.shape[1], "BLOCK": block}
    _convolve[grid](
        *(x, ring, weight, weight if bias is None else bias, out, rows.positions),
        *places,
        *paths,
        **sizes,
        NUM_TAPS=len(weight),
        HAS_BIAS=bias is not None,
        HAS_TREES=rows.paths is not None,
        num_warps=4,
        **EXACT,
    )
    _store[grid](x, ring, *places, **sizes, num_warps=4)
    return out


@triton.jit
def _convolve(
    x,  # [R, C]
    ring,  # [N, RING, C]
    weight,  # [L, C]
    bias,  # [C], read when HAS_BIAS only
    out,  # [R, C]
    positions,  # [R]
    row_segments,  # [R]
    row_starts,  # [S + 1]
    states,  # [S]
    first_slots,  # [S]
    path_starts,  # [R + 1]; the paths are read when HAS_TREES only
    path_slots,
    NUM_CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = at < NUM_CHANNELS
    position, segment = tl.load(positions + row), tl.load(row_segments + row)
    first_slot, first_row = tl.load(first_slots + segment), tl.load(row_starts + segment)
    state = tl.load(states + segment).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in range(NUM_TAPS):
        before = position - (NUM_TAPS - 1) + tap
        is_there = before >= 0
        slot = tl.maximum(before, 0)
        if HAS_TREES:
            from_end = tl.load(path_starts + row + 1) - 1 - (position - before)
            on_path = is_there & (from_end >= tl.load(path_starts + row))
            slot = tl.where(on_path, tl.load(path_slots + from_end, mask=on_path, other=0), slot)
        is_own = slot >= first_slot
        own = (first_row + slot - first_slot).to(tl.int64) * NUM_CHANNELS
        waiting = (state * RING + slot % RING) * NUM_CHANNELS
        fresh = tl.load(x + own + at, mask=is_channel & is_there & is_own, other=0.0).to(tl.float32)
        old = tl.load(ring + waiting + at, mask=is_channel & is_there & (slot < first_slot), other=0.0).to(tl.float32)
        seen = tl.where(is_own, fresh, old)
        total += seen * tl.load(weight + tap * NUM_CHANNELS + at, mask=is_channel, other=0.0).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + at, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(out + row * NUM_CHANNELS + at, total.to(out.dtype.element_ty), mask=is_channel)


@triton.jit
def _store(
    x,  # [R, C]
    ring,  # [N, RING, C]
    row_segments,  # [R]
    row_starts,  # [S + 1]
    states,  # [S]
    first_slots,  # [S]
    NUM_CHANNELS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.load(row_segments + row)
    slot = tl.load(first_slots + segment) + row - tl.load(row_starts + segment)
    is_last = (at < NUM_CHANNELS) & (tl.load(row_starts + segment + 1) - row <= RING)
    place = tl.load(states + segment).to(tl.int64) * RING + slot % RING
    tl.store(
        ring + place * NUM_CHANNELS + at, tl.load(x + row * NUM_CHANNELS + at, mask=is_last, other=0.0), mask=is_last
    )
