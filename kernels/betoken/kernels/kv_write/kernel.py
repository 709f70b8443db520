"""The KV write in Triton: one program a row and head."""

import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.rows import PagedRows


def kv_write_triton(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows) -> None:
    """See `betoken.kernels.kv_write.kv_write`."""
    num_rows, num_heads, key_size = key.shape
    if num_rows == 0:
        return
    key, value = (new if new.stride(2) == 1 else new.contiguous() for new in (key, value))
    paths = (rows.paths.starts, rows.paths.slots) if rows.paths else (rows.positions, rows.positions)
    _write[(num_rows, num_heads)](
        key,
        value,
        key_cache,
        value_cache,
        rows.positions,
        rows.row_segments,
        rows.page_starts,
        rows.page_ids,
        *paths,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        NUM_HEADS=num_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value.shape[2],
        PAGE_SIZE=key_cache.shape[1],
        BLOCK=triton.next_power_of_2(max(key_size, value.shape[2])),
        HAS_TREES=rows.paths is not None,
        num_warps=1,
    )


@triton.jit
def _write(
    key,  # [R, H, D], last dimension dense
    value,  # [R, H, E], last dimension dense
    key_cache,  # [pages, PAGE_SIZE, H, D]
    value_cache,  # [pages, PAGE_SIZE, H, E]
    positions,  # [R]
    row_segments,  # [R]
    page_starts,  # [S + 1]
    page_ids,
    path_starts,  # [R + 1]; the paths are read when HAS_TREES only
    path_slots,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TREES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(positions + row)
    if HAS_TREES:
        path_end = tl.load(path_starts + row + 1)
        has_path = path_end > tl.load(path_starts + row)
        slot = tl.where(has_path, tl.load(path_slots + path_end - 1, mask=has_path, other=0), slot)
    page_start = tl.load(page_starts + tl.load(row_segments + row))
    page = tl.load(page_ids + page_start + slot // PAGE_SIZE).to(tl.int64)
    place = (page * PAGE_SIZE + slot % PAGE_SIZE) * NUM_HEADS + head
    at = tl.arange(0, BLOCK)
    # In float32, back to the same bits when stored: Triton 3.6 interprets no constants of bfloat16.
    new_value = tl.load(value + row * value_row_stride + head * value_head_stride + at, mask=at < VALUE_SIZE, other=0.0)
    new_value = new_value.to(tl.float32)
    is_bad = tl.max((tl.abs(new_value) < float("inf")).to(tl.int32) ^ 1, axis=0) > 0
    tl.store(value_cache + place * VALUE_SIZE + at, tl.where(is_bad, 0.0, new_value), mask=at < VALUE_SIZE)
    new_key = tl.load(key + row * key_row_stride + head * key_head_stride + at, mask=at < KEY_SIZE).to(tl.float32)
    tl.store(key_cache + place * KEY_SIZE + at, tl.where(is_bad, float("nan"), new_key), mask=at < KEY_SIZE)
