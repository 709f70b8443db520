"""One read of the logits that leaves, per row, a short list of places worth a second look; Triton.

Ids are grouped by 64: the ids that share 16 consecutive Philox calls (`triton_math.token_id`). Removed ids
certainly cannot be chosen; the remaining ids are still undecided. Bounds are computed in plain float32 with a margin
far above its errors, so no result depends on how they round.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from betoken.kernels.triton_math import EXACT

_IDS_PER_TILE = 1024  # 256 calls, 16 groups
_TILES_PER_CHUNK = 4
_MAX_GROUPS_PER_WARP = 512


@dataclass(slots=True)
class Candidates:
    """The remaining ids of R rows, G groups each before narrowing."""

    groups: torch.Tensor
    """[R, G] int32, the first `counts` of a row in ascending order."""
    counts: torch.Tensor
    """[R] int32."""
    largest: torch.Tensor
    """[R] float32, the largest logit."""
    mass: torch.Tensor
    """[R] float32, about the sum of exp((logit - largest) / temperature)."""
    floor: torch.Tensor
    """[R] float32; ids whose logit is not above it cannot be chosen. A listed group's largest is not below it."""


def narrow(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    keeps_top_k: bool,
) -> Candidates:
    """The candidates of each row; arguments as in `sample`.

    Args:
        keeps_top_k: every id that top_k leaves is a candidate, also one too unlikely to win against any noise.
    """
    num_rows, vocab_size = logits.shape
    num_groups = triton.cdiv(vocab_size, _IDS_PER_TILE) * 16
    num_chunks = triton.cdiv(vocab_size, _IDS_PER_TILE * _TILES_PER_CHUNK)
    maxima = torch.empty((num_rows, num_groups), dtype=logits.dtype, device=logits.device)
    # Separate allocations: parts of one tensor would be aligned, and kernels compiled, by the number of rows.
    chunk_maxima, chunk_masses = (
        torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    groups = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    largest, mass, floor = (torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(3))
    _scan[(num_chunks, num_rows)](
        logits,
        temperature,
        maxima,
        chunk_maxima,
        chunk_masses,
        vocab_size,
        num_groups,
        num_chunks,
        TILES=_TILES_PER_CHUNK,
        num_warps=4,
        **EXACT,
    )
    padded = triton.next_power_of_2(num_groups)
    _narrow[(num_rows,)](
        maxima,
        chunk_maxima,
        chunk_masses,
        temperature,
        top_k,
        top_p,
        min_p,
        groups,
        counts,
        largest,
        mass,
        floor,
        vocab_size,
        num_groups,
        num_chunks,
        KEEPS_TOP_K=keeps_top_k,
        GROUPS=padded,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=min(max(padded // _MAX_GROUPS_PER_WARP, 4), 16),
        **EXACT,
    )
    return Candidates(groups, counts, largest, mass, floor)


@triton.jit
def by_word(word0, word1, word2, word3):
    """Four tensors [A, B], one per word of the same calls, as one: [A, B, 2, 2]."""
    return tl.join(tl.join(word0, word1), tl.join(word2, word3))


@triton.jit
def load_listed(start, groups, row, num_groups, first, count, vocab_size, GROUPS: tl.constexpr):
    """The listed groups [first, first + GROUPS) of the row whose logits begin at `start`.

    Returns: logits [GROUPS, 16, 2, 2] float32 and their ids, -inf and 2^31 - 1 for missing ones; calls [GROUPS, 16].
    """
    place = first + tl.arange(0, GROUPS)
    is_listed = (place < count)[:, None]
    group = tl.load(groups + row * num_groups + place, mask=place < count, other=0)
    lane = tl.arange(0, 16)[None, :]
    ids = (group // 16 * 1024 + group % 16 * 16)[:, None] + lane
    # Loaded word by word: runs of 16 ids, and the four of a call in the same thread.
    x0 = tl.load(start + ids, mask=is_listed & (ids < vocab_size), other=float("-inf"))
    x1 = tl.load(start + ids + 256, mask=is_listed & (ids + 256 < vocab_size), other=float("-inf"))
    x2 = tl.load(start + ids + 512, mask=is_listed & (ids + 512 < vocab_size), other=float("-inf"))
    x3 = tl.load(start + ids + 768, mask=is_listed & (ids + 768 < vocab_size), other=float("-inf"))
    ids = tl.where(is_listed, ids, 0x7FFFFC00)  # 768 more still fit
    ids = by_word(ids, ids + 256, ids + 512, ids + 768)
    ids = tl.where(ids < vocab_size, ids, 0x7FFFFFFF)
    return by_word(x0, x1, x2, x3).to(tl.float32), ids, group[:, None] * 16 + lane


@triton.jit
def inverse_temperature(temperature):
    """log2(e) / T, so that exp2(x * it) is exp(x / T); T = 0 counts as 1."""
    return 1.4426950408889634 / tl.where(temperature > 0.0, temperature, 1.0)


@triton.jit
def relative_error(largest, temperature):
    """Above the relative error of a sum of exp2 against the sum of the exact weights."""
    return 1.52587890625e-05 + tl.abs(largest) / tl.where(temperature > 0.0, temperature, 1.0) * 4.76837158203125e-07


@triton.jit
def _scan(
    logits,  # [R, V]
    temperature,  # [R] float32
    maxima,  # [R, G], out: the largest logit of each group
    chunk_maxima,  # [R, C] float32, out
    chunk_masses,  # [R, C] float32, out: sum of exp((logit - chunk maximum) / T)
    vocab_size,
    num_groups,
    num_chunks,
    TILES: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    chunk = tl.program_id(0)
    tile = chunk * TILES + tl.arange(0, TILES)[:, None]
    first = tile * 1024 + tl.arange(0, 256)[None, :]
    start = logits + row * vocab_size
    # One word at a time, [TILES, 256]: runs of 256 ids, and the four of a call in the same thread.
    x0 = tl.load(start + first, mask=first < vocab_size, other=float("-inf")).to(tl.float32)
    x1 = tl.load(start + first + 256, mask=first + 256 < vocab_size, other=float("-inf")).to(tl.float32)
    x2 = tl.load(start + first + 512, mask=first + 512 < vocab_size, other=float("-inf")).to(tl.float32)
    x3 = tl.load(start + first + 768, mask=first + 768 < vocab_size, other=float("-inf")).to(tl.float32)
    by_call = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    by_group = tl.max(tl.reshape(by_call, [TILES, 16, 16]), axis=2)
    group = tile * 16 + tl.arange(0, 16)[None, :]
    tl.store(maxima + row * num_groups + group, by_group.to(maxima.dtype.element_ty), mask=group < num_groups)
    largest = tl.max(tl.max(by_group, axis=1), axis=0)
    factor = inverse_temperature(tl.load(temperature + row))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    # Subtracted first: a product that overflows would make NaN, the mark of a bad row, of a masked id.
    mass = tl.exp2((x0 - shift) * factor) + tl.exp2((x1 - shift) * factor)
    mass += tl.exp2((x2 - shift) * factor) + tl.exp2((x3 - shift) * factor)
    tl.store(chunk_maxima + row * num_chunks + chunk, largest)
    tl.store(chunk_masses + row * num_chunks + chunk, tl.sum(tl.sum(mass, axis=1), axis=0))


@triton.jit
def _narrow(
    maxima,  # [R, G]
    chunk_maxima,  # [R, C] float32
    chunk_masses,  # [R, C] float32
    temperature,  # [R] float32
    top_k,  # [R] int32
    top_p,  # [R] float32
    min_p,  # [R] float32
    groups,  # [R, G] int32, out
    counts,  # [R] int32, out
    largest_out,  # [R] float32, out
    mass_out,  # [R] float32, out
    floor_out,  # [R] float32, out
    vocab_size,
    num_groups,
    num_chunks,
    KEEPS_TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    factor = inverse_temperature(heat)
    chunk = tl.arange(0, CHUNKS)
    chunk_most = tl.load(chunk_maxima + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    chunk_mass = tl.load(chunk_masses + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    largest = tl.max(chunk_most, axis=0)
    mass = tl.sum(chunk_mass * tl.exp2((chunk_most - largest) * factor), axis=0)
    group = tl.arange(0, GROUPS)
    most = tl.load(maxima + row * num_groups + group, mask=group < num_groups, other=float("-inf")).to(tl.float32)

    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    has_top_k = (heat > 0.0) & (k > 0) & (k < vocab_size)
    has_top_p = (heat > 0.0) & (p < 1.0)
    # top_p is taken of all that top_k leaves: with both, only ids that top_k drops may go.
    keeps_top_k = (has_top_k & has_top_p) | KEEPS_TOP_K
    # The most likely id passes every filter, and noise is in [-2.9, 22.9].
    low = largest - 26.0 * heat
    if has_top_k | has_top_p:
        weight = tl.exp2((most - largest) * factor)
        enough_mass = p * mass * (1.0 + 4.0 * relative_error(largest, heat))
        is_found = False
        high = largest
        bottom = low
        # Ten halvings find a level that k maxima reach, or maxima that weigh top_p: what is below it is dropped.
        for _ in range(10):
            middle = 0.5 * (bottom + high)
            is_reached = most >= middle
            has_count = has_top_k & (tl.sum(is_reached.to(tl.int32), axis=0) >= k)
            has_mass = has_top_p & (tl.sum(tl.where(is_reached, weight, 0.0), axis=0) >= enough_mass)
            is_enough = tl.where(keeps_top_k, has_count, has_count | has_mass)
            is_found = is_found | is_enough
            bottom = tl.where(is_enough, middle, bottom)
            high = tl.where(is_enough, high, middle)
        low = tl.where(keeps_top_k & (is_found == 0), float("-inf"), bottom)
    elif KEEPS_TOP_K:
        low = float("-inf")
    least = tl.load(min_p + row)
    if (heat > 0.0) & (least > 0.0) & (keeps_top_k == 0):
        low = tl.maximum(low, largest + heat * (tl.log2(least) * 0.6931471805599453 - 0.01))
    # Ids whose quotients by T round to the same number tie.
    floor = low - (tl.abs(largest) + 32.0 * heat + 1e-20) * 9.5367431640625e-07
    is_listed = (group < num_groups) & (most >= floor)
    place = tl.cumsum(is_listed.to(tl.int32), axis=0) - 1
    tl.store(groups + row * num_groups + place, group, mask=is_listed)
    tl.store(counts + row, tl.sum(is_listed.to(tl.int32), axis=0))
    tl.store(largest_out + row, largest)
    tl.store(mass_out + row, mass)
    tl.store(floor_out + row, floor)
