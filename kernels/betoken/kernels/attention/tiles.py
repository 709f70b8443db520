"""Parts of the Triton attention: addresses of keys, the contribution of a chunk, the combination of chunks.

A query's results depend on its own lane only; tiles are cut at absolute positions. Launched by `kernel`.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # the maximum of a query that has seen no key


@triton.jit
def find_sequence(row_starts, num_segments, block, ROWS: tl.constexpr):
    """The sequence of a block of queries: the blocks of sequence s begin at row_starts[s] // ROWS + s."""
    low = 0
    high = num_segments - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(row_starts + middle) // ROWS + middle <= block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _pool_slots(pages, slots, is_seen, PAGE_SIZE: tl.constexpr):
    """Slots of the pool, int64, for slots of the sequence with the page ids from `pages` on."""
    page = tl.load(pages + slots // PAGE_SIZE, mask=is_seen, other=0).to(tl.int64)
    return page * PAGE_SIZE + slots % PAGE_SIZE


@triton.jit
def _load_tile(cache, head, pool_slots, is_seen, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Keys or values of one head: [BLOCK_N, BLOCK], 0 beyond SIZE and for masked keys."""
    at = tl.arange(0, BLOCK)
    pointers = cache + (pool_slots * NUM_HEADS + head)[:, None] * SIZE + at[None, :]
    return tl.load(pointers, mask=is_seen[:, None] & (at < SIZE)[None, :], other=0.0)


@triton.jit
def _dot(left, right, sums, IS_INTERPRETED: tl.constexpr):
    """sums + left x right, in float32."""
    if IS_INTERPRETED:  # it would multiply the bits of bfloat16 as integers
        return tl.dot(left.to(tl.float32), right.to(tl.float32), sums)
    else:
        return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _add_products(sums, weights, values, IS_INTERPRETED: tl.constexpr):
    """sums + weights x values; of a half type, weights keep what their rounding left over."""
    high = weights.to(values.dtype)
    sums = _dot(high, values, sums, IS_INTERPRETED)
    if values.dtype != tl.float32:
        sums = _dot((weights - high.to(tl.float32)).to(values.dtype), values, sums, IS_INTERPRETED)
    return sums


@triton.jit
def _weigh(
    scores,
    maximum,
    total,
    at,
    first,
    last,
    slope,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Raw scores of keys `at` -> weights [M, N], factor on what was summed before [M], new maximum and total."""
    scores = scores * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * (scores / softcap)) + 1.0))  # tanh
    if HAS_SLOPES:
        scores += slope[:, None] * (at[None, :] - last[:, None]).to(tl.float32)
    is_visible = (at[None, :] >= first[:, None]) & (at[None, :] <= last[:, None])
    scores = tl.where(is_visible, scores, LOWEST)
    raised = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.where(is_visible, tl.exp(scores - raised[:, None]), 0.0)
    fade = tl.exp(maximum - raised)
    return weights, fade, raised, total * fade + tl.sum(weights, 1)


@triton.jit
def fold(maximum, total, sums, part_maximum, part_total, part_sums):
    """Combine the results so far with the next chunk. A fully masked chunk changes no bit."""
    raised = tl.maximum(maximum, part_maximum)
    fade = tl.exp(maximum - raised)
    part_fade = tl.exp(part_maximum - raised)
    sums = sums * fade[:, None] + part_sums * part_fade[:, None]
    return raised, total * fade + part_total * part_fade, sums


@triton.jit
def fold_sinks(maximum, total, sums, sinks):
    """The results with each query's sink [M] as a last chunk, of one key without a value."""
    return fold(maximum, total, sums, sinks, 1.0, tl.zeros_like(sums))


@triton.jit
def _path_slots(path_starts, path_slots, positions, row, at):
    """The slots of positions `at` on the path of a row; those after its own position are not to be read."""
    start = tl.load(path_starts + row)
    last = tl.load(positions + row)
    fork = last + 1 - (tl.load(path_starts + row + 1) - start)
    on_list = (at >= fork) & (at <= last)
    return tl.where(on_list, tl.load(path_slots + start + at - fork, mask=on_list, other=0), at), at <= last


@triton.jit
def reduce_chunk(
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
    begin,
    stop,
    fork,
    first_row,
    end_row,
    slope,
    scale,
    softcap,
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_TREES: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Maximum [M], sum [M] and weighted values [M, E] over keys of positions [begin, stop) of one chunk.

    Up to `fork` all rows find a position's key in the slot of its number; from there on each on its own path.
    """
    maximum = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    no_scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    shared_stop = stop
    if HAS_TREES:
        shared_stop = tl.minimum(stop, tl.maximum(begin, fork // BLOCK_N * BLOCK_N))
    for start in range(begin, shared_stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        is_seen = at < stop
        slots = _pool_slots(pages, at, is_seen, PAGE_SIZE)
        keys = _load_tile(key_cache, head, slots, is_seen, NUM_HEADS, KEY_SIZE, BLOCK_D)
        scores = _dot(queries, tl.trans(keys), no_scores, IS_INTERPRETED)
        weights, fade, maximum, total = _weigh(
            scores, maximum, total, at, first, last, slope, scale, softcap, HAS_SOFTCAP, HAS_SLOPES
        )
        values = _load_tile(value_cache, head, slots, is_seen, NUM_HEADS, VALUE_SIZE, BLOCK_E)
        sums = _add_products(sums * fade[:, None], weights, values, IS_INTERPRETED)
    if HAS_TREES:
        for start in range(shared_stop, stop, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            scores = no_scores
            for path_row in range(first_row, end_row):
                slots, is_seen = _path_slots(path_starts, path_slots, positions, path_row, at)
                slots = _pool_slots(pages, slots, is_seen, PAGE_SIZE)
                keys = _load_tile(key_cache, head, slots, is_seen, NUM_HEADS, KEY_SIZE, BLOCK_D)
                own_scores = _dot(queries, tl.trans(keys), no_scores, IS_INTERPRETED)
                scores = tl.where((row == path_row)[:, None], own_scores, scores)
            weights, fade, maximum, total = _weigh(
                scores, maximum, total, at, first, last, slope, scale, softcap, HAS_SOFTCAP, HAS_SLOPES
            )
            sums = sums * fade[:, None]
            for path_row in range(first_row, end_row):
                slots, is_seen = _path_slots(path_starts, path_slots, positions, path_row, at)
                slots = _pool_slots(pages, slots, is_seen, PAGE_SIZE)
                values = _load_tile(value_cache, head, slots, is_seen, NUM_HEADS, VALUE_SIZE, BLOCK_E)
                own_sums = _add_products(sums, weights, values, IS_INTERPRETED)
                sums = tl.where((row == path_row)[:, None], own_sums, sums)
    return maximum, total, sums
