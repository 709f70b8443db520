"""Paged attention in Triton: the queries that share key heads share each load of their keys.

One program takes up to 32 queries (row, head) of one sequence and key head. Every chunk of 256 absolute positions gives
a maximum, a sum and weighted values. They are folded in order: in registers or, when few rows share many keys, by a
second kernel. Both fold the same numbers, so how a launch is divided changes no bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.attention.reference import CHUNK_SIZE
from betoken.kernels.attention.tiles import LOWEST, find_sequence, fold, fold_sinks, reduce_chunk
from betoken.kernels.rows import PagedRows

_BLOCK_QUERIES = 32
_TARGET_PROGRAMS = 264  # two for each multiprocessor of an H200; with fewer, chunks are spread over programs too
_MAX_PART_BYTES = 1 << 28  # chunks' results in memory; what would take more is not divided
CHUNK = tl.constexpr(CHUNK_SIZE)


def attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    span: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """See `betoken.kernels.attention.attention`. Reads nothing back from the device."""
    num_rows, num_query_heads, key_size = query.shape
    _, page_size, num_heads, value_size = value_cache.shape
    out = torch.empty(num_rows, num_query_heads, value_size, dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    query = query if query.stride(2) == 1 else query.contiguous()
    group = num_query_heads // num_heads
    # Sizes of tiles come from the model's shape alone: the number of rows must not choose the arithmetic.
    block_queries = max(_BLOCK_QUERIES, triton.next_power_of_2(group))
    rows_per_block = block_queries // group
    block_key, block_value = (max(16, triton.next_power_of_2(size)) for size in (key_size, value_size))
    largest_row_bytes = max(block_key, block_value) * query.element_size()
    num_blocks = num_rows // rows_per_block + len(rows.page_starts) - 1  # no fewer than there are
    num_chunks = -(-rows.max_length // CHUNK_SIZE) if rows.max_length else 1
    part_bytes = num_rows * num_query_heads * num_chunks * (value_size + 2) * 4
    # A recorded launch has room for as many sequences as rows: most of its blocks may be empty, these cannot.
    num_full_blocks = triton.cdiv(num_rows, rows_per_block)
    num_splits = min(num_chunks, max(1, _TARGET_PROGRAMS // (num_full_blocks * num_heads)))
    if part_bytes > _MAX_PART_BYTES:
        num_splits = 1
    is_split = num_splits > 1
    parts = [out] * 3
    if is_split:
        lead = (num_rows, num_query_heads, num_chunks)
        parts = [
            torch.empty(shape, dtype=torch.float32, device=out.device) for shape in (lead, lead, (*lead, value_size))
        ]
    starts, slots = (rows.paths.starts, rows.paths.slots) if rows.paths else (rows.positions, rows.positions)
    has_sinks = sinks is not None
    head_sinks = query if sinks is None else sinks.contiguous()
    head_slopes = query if slopes is None else slopes.contiguous()
    options = {"num_warps": 4, "num_stages": 3 if largest_row_bytes <= 256 else 2, "enable_fp_fusion": False}
    _attend[(num_blocks, num_heads, num_splits)](
        query,
        key_cache,
        value_cache,
        out,
        *parts,
        rows.positions,
        rows.row_starts(),
        rows.page_starts,
        rows.page_ids,
        starts,
        slots,
        head_sinks,
        head_slopes,
        len(rows.page_starts) - 1,
        num_chunks,
        num_splits,
        query.stride(0),
        query.stride(1),
        scale,
        window,
        span,
        softcap,
        NUM_HEADS=num_heads,
        GROUP=group,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        PAGE_SIZE=page_size,
        ROWS=rows_per_block,
        BLOCK_M=block_queries,
        BLOCK_N=64 if largest_row_bytes <= 512 else 32,
        BLOCK_D=block_key,
        BLOCK_E=block_value,
        HAS_WINDOW=window > 0,
        HAS_SPAN=span > 0,
        HAS_SOFTCAP=softcap > 0,
        HAS_SLOPES=slopes is not None,
        HAS_TREES=rows.paths is not None,
        HAS_SINKS=has_sinks,
        IS_SPLIT=is_split,
        IS_INTERPRETED=query.device.type == "cpu",
        **options,
    )
    if is_split:
        _fold_chunks[(num_rows, num_query_heads)](
            out,
            *parts,
            rows.positions,
            head_sinks,
            num_chunks,
            window,
            span,
            NUM_QUERY_HEADS=num_query_heads,
            VALUE_SIZE=value_size,
            BLOCK_E=block_value,
            HAS_WINDOW=window > 0,
            HAS_SPAN=span > 0,
            HAS_SINKS=has_sinks,
            **options,
        )
    return out


@triton.jit(do_not_specialize=["num_segments", "num_chunks", "num_splits", "window", "span"])
def _attend(
    query,  # [R, Hq, D], last dimension dense
    key_cache,  # [pages, PAGE_SIZE, H, D]
    value_cache,  # [pages, PAGE_SIZE, H, E]
    out,  # [R, Hq, E]; not written when IS_SPLIT
    part_maximum,  # [R, Hq, chunks] float32; the parts are written when IS_SPLIT only
    part_total,  # [R, Hq, chunks] float32
    part_sums,  # [R, Hq, chunks, E] float32
    positions,  # [R]
    row_starts,  # [S + 1]
    page_starts,  # [S + 1]
    page_ids,
    path_starts,  # [R + 1]; the paths are read when HAS_TREES only
    path_slots,
    sinks,  # [Hq]; read when HAS_SINKS only
    slopes,  # [Hq]; read when HAS_SLOPES only
    num_segments,
    num_chunks,
    num_splits,
    query_row_stride,
    query_head_stride,
    scale,
    window,
    span,
    softcap,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Program (b, h, i): the b-th block of queries at key head h, and every num_splits-th chunk from the i-th on."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    segment = find_sequence(row_starts, num_segments, block, ROWS)
    segment_start = tl.load(row_starts + segment)
    first_row = segment_start + (block - segment_start // ROWS - segment) * ROWS
    end_row = tl.minimum(first_row + ROWS, tl.load(row_starts + segment + 1))
    if first_row >= end_row:
        return
    # 1. The queries, and the positions each sees: [first, last].
    lane = tl.arange(0, BLOCK_M)
    row = first_row + lane // GROUP
    is_real = (lane < ROWS * GROUP) & (row < end_row)
    query_head = head * GROUP + lane % GROUP
    at = tl.arange(0, BLOCK_D)
    pointers = query + row.to(tl.int64) * query_row_stride + query_head * query_head_stride
    is_element = is_real[:, None] & (at < KEY_SIZE)[None, :]
    queries = tl.load(pointers[:, None] + at[None, :], mask=is_element, other=0.0)
    last = tl.load(positions + row, mask=is_real, other=-1)
    first = tl.zeros([BLOCK_M], tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(last - window + 1, 0)
    if HAS_SPAN:
        first = tl.maximum(first, last // span * span)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + query_head, mask=is_real, other=0.0).to(tl.float32)
    begin = tl.min(tl.where(is_real, first, 2147483647), 0)
    stop = tl.max(last, 0) + 1
    fork = stop
    if HAS_TREES:
        path_start = tl.load(path_starts + row, mask=is_real, other=0)
        path_length = tl.load(path_starts + row + 1, mask=is_real, other=0) - path_start
        fork = tl.min(tl.where(path_length > 0, last + 1 - path_length, 2147483647), 0)
    # 2. The chunks, each written as it is or folded.
    pages = page_ids + tl.load(page_starts + segment)
    place = row.to(tl.int64) * (NUM_HEADS * GROUP) + query_head
    at = tl.arange(0, BLOCK_E)
    is_element = is_real[:, None] & (at < VALUE_SIZE)[None, :]
    maximum = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for chunk in range(begin // CHUNK + tl.program_id(2), (stop + CHUNK - 1) // CHUNK, num_splits):
        chunk_begin = tl.maximum(chunk * CHUNK, begin // BLOCK_N * BLOCK_N)
        part_max, part_sum, part_values = reduce_chunk(
            queries,
            key_cache,
            value_cache,
            pages,
            positions,
            path_starts,
            path_slots,
            head,
            row,
            first,
            last,
            chunk_begin,
            tl.minimum((chunk + 1) * CHUNK, stop),
            fork,
            first_row,
            end_row,
            slope,
            scale,
            softcap,
            NUM_HEADS,
            KEY_SIZE,
            VALUE_SIZE,
            PAGE_SIZE,
            BLOCK_M,
            BLOCK_N,
            BLOCK_D,
            BLOCK_E,
            HAS_SOFTCAP,
            HAS_SLOPES,
            HAS_TREES,
            IS_INTERPRETED,
        )
        if IS_SPLIT:
            part = place * num_chunks + chunk
            tl.store(part_maximum + part, part_max, mask=is_real)
            tl.store(part_total + part, part_sum, mask=is_real)
            tl.store(part_sums + part[:, None] * VALUE_SIZE + at[None, :], part_values, mask=is_element)
        else:
            maximum, total, sums = fold(maximum, total, sums, part_max, part_sum, part_values)
    if not IS_SPLIT:
        if HAS_SINKS:
            own = tl.load(sinks + query_head).to(tl.float32)
            maximum, total, sums = fold_sinks(maximum, total, sums, own)
        results = (sums / tl.where(is_real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * VALUE_SIZE + at[None, :], results, mask=is_element)


@triton.jit(do_not_specialize=["num_chunks", "window", "span"])
def _fold_chunks(
    out,  # [R, Hq, E]
    part_maximum,  # [R, Hq, chunks]
    part_total,  # [R, Hq, chunks]
    part_sums,  # [R, Hq, chunks, E]
    positions,  # [R]
    sinks,  # [Hq]; read when HAS_SINKS only
    num_chunks,
    window,
    span,
    NUM_QUERY_HEADS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (r, h): folds the chunks of one query in order."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * NUM_QUERY_HEADS + tl.program_id(1)
    last = tl.load(positions + row)
    first_chunk = 0
    if HAS_WINDOW:
        first_chunk = tl.maximum(last - window + 1, 0) // CHUNK
    if HAS_SPAN:
        first_chunk = tl.maximum(first_chunk, last // span * span // CHUNK)
    at = tl.arange(0, BLOCK_E)
    lane = tl.arange(0, 1)
    maximum = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, BLOCK_E], tl.float32)
    for chunk in range(first_chunk, last // CHUNK + 1):
        part = place * num_chunks + chunk + lane
        part_values = tl.load(part_sums + part[:, None] * VALUE_SIZE + at[None, :], mask=(at < VALUE_SIZE)[None, :])
        part_max, part_sum = tl.load(part_maximum + part), tl.load(part_total + part)
        maximum, total, sums = fold(maximum, total, sums, part_max, part_sum, part_values)
    if HAS_SINKS:
        own = tl.load(sinks + tl.program_id(1) + lane).to(tl.float32)
        maximum, total, sums = fold_sinks(maximum, total, sums, own)
    results = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (place + lane)[:, None] * VALUE_SIZE + at[None, :], results, mask=(at < VALUE_SIZE)[None, :])
