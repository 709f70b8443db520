"""`weights.target_weights` in Triton, without an [R, V] result: what a row needs to give any of its ids' weights.

Thresholds are found by bisection between the quotients that occur; every sum is over integers and exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from betoken.kernels.sample.ranks import LEAST_KEY, key_of
from betoken.kernels.triton_math import EXACT, exp_f32

_IDS_PER_TILE = 1024


@dataclass(slots=True)
class RowWeights:
    """R rows; what `weight_of` and the rules on top of it read. All [R]."""

    tops: torch.Tensor
    """float32, the largest logit / T."""
    floors: torch.Tensor
    """int64, the key of the smallest logit / T that top_k and top_p leave."""
    likeliest: torch.Tensor
    """int32, the lowest of the most likely ids."""
    totals: torch.Tensor
    """int64, sum of the weights."""
    spreads: torch.Tensor
    """int64, sum of each weight times the distance of its logit / T below the top."""


def row_weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> RowWeights:
    """Weights of validated tensors; arguments as in `weights.target_weights`."""
    num_rows, vocab_size = logits.shape
    tops = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    floors, totals, spreads = (torch.empty(num_rows, dtype=torch.int64, device=logits.device) for _ in range(3))
    likeliest = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        _row_weights[(num_rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            tops,
            floors,
            likeliest,
            totals,
            spreads,
            vocab_size,
            BLOCK=_IDS_PER_TILE,
            num_warps=4,
            **EXACT,
        )
    return RowWeights(tops, floors, likeliest, totals, spreads)


@triton.jit
def weight_of(x, ids, heat, least, top, floor, likeliest):
    """The integer weights of ids whose logits are `x`; float32 and int32 in, int64 out. -inf weighs 0."""
    scaled = tl.div_rn(x, tl.where(heat > 0.0, heat, 1.0) + tl.zeros_like(x))
    share = exp_f32(scaled - top)
    is_kept = (key_of(scaled).to(tl.int64) >= floor) & (share >= least)
    sampled = tl.where(is_kept, (share * 1099511627776.0).to(tl.int64), 0)
    return tl.where(heat > 0.0, sampled, tl.where(ids == likeliest, 1 << 40, 0))


@triton.jit
def weight_at(logits, row, token_id, temperature, min_p, tops, floors, likeliest, vocab_size):
    """The integer weight [1] of one id of a row."""
    x = tl.load(logits + row * vocab_size + token_id).to(tl.float32) + tl.zeros([1], tl.float32)
    return weight_of(
        x,
        token_id,
        tl.load(temperature + row),
        tl.load(min_p + row),
        tl.load(tops + row),
        tl.load(floors + row),
        tl.load(likeliest + row),
    )


@triton.jit
def _scaled(start, first, vocab_size, heat, BLOCK: tl.constexpr):
    """logit / T of the ids [first, first + BLOCK), -inf for missing ones."""
    ids = first + tl.arange(0, BLOCK)
    x = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.where(heat > 0.0, heat, 1.0) + tl.zeros_like(x))


@triton.jit
def _most_likely(start, vocab_size, BLOCK: tl.constexpr):
    """The largest logit and the lowest id that has it."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        is_better = x > best
        best = tl.where(is_better, x, best)
        best_id = tl.where(is_better, ids, best_id)
    most = tl.max(best, axis=0)
    return most, tl.min(tl.where(best == most, best_id, 0x7FFFFFFF), axis=0)


@triton.jit
def _split(start, key, vocab_size, heat, top, BLOCK: tl.constexpr):
    """How many ids have a key above `key`, their weight, the lowest of their keys, and the highest of the others."""
    number = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.int64)
    next_above = tl.full([BLOCK], 0x7FFFFFFF, tl.int64)
    next_below = tl.full([BLOCK], LEAST_KEY, tl.int64)
    for first in range(0, vocab_size, BLOCK):
        scaled = _scaled(start, first, vocab_size, heat, BLOCK)
        own = key_of(scaled).to(tl.int64)
        is_above = own > key
        number += is_above.to(tl.int32)
        weight += tl.where(is_above, (exp_f32(scaled - top) * 1099511627776.0).to(tl.int64), 0)
        next_above = tl.where(is_above, tl.minimum(next_above, own), next_above)
        next_below = tl.where(is_above, next_below, tl.maximum(next_below, own))
    return tl.sum(number, axis=0), tl.sum(weight, axis=0), tl.min(next_above, axis=0), tl.max(next_below, axis=0)


@triton.jit
def _row_weights(
    logits,  # [R, V]
    temperature,  # [R] float32
    top_k,  # [R] int32
    top_p,  # [R] float32
    min_p,  # [R] float32
    tops,  # [R] float32, out
    floors,  # [R] int64, out
    likeliest,  # [R] int32, out
    totals,  # [R] int64, out
    spreads,  # [R] int64, out
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab_size
    heat = tl.load(temperature + row)
    most, most_id = _most_likely(start, vocab_size, BLOCK)
    top = tl.div_rn(most, tl.where(heat > 0.0, heat, 1.0))
    floor = tl.full([], LEAST_KEY, tl.int64)
    # Unused values have names too: to the compiler `_` is one variable, and no loop may change its type.
    k = tl.load(top_k + row)
    if (heat > 0.0) & (k > 0) & (k < vocab_size):  # the lowest key that fewer than k are above
        high = key_of(top).to(tl.int64)
        while floor < high:
            middle = (floor + high) >> 1
            number, _weight, above, below = _split(start, middle, vocab_size, heat, top, BLOCK)
            floor = tl.where(number >= k, above, floor)
            high = tl.where(number >= k, high, below)
    share = tl.load(top_p + row)
    if (heat > 0.0) & (share < 1.0):  # the lowest key that less than top_p of what top_k leaves is above
        _number, left, _above, _below = _split(start, floor - 1, vocab_size, heat, top, BLOCK)
        bound = share.to(tl.float64) * left.to(tl.float64)
        high = key_of(top).to(tl.int64)
        while floor < high:
            middle = (floor + high) >> 1
            _number, weight, above, below = _split(start, middle, vocab_size, heat, top, BLOCK)
            is_light = weight.to(tl.float64) < bound
            floor = tl.where(is_light, floor, above)
            high = tl.where(is_light, below, high)
    least = tl.load(min_p + row)
    total = tl.zeros([BLOCK], tl.int64)
    spread = tl.zeros([BLOCK], tl.int64)
    for first in range(0, vocab_size, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        weight = weight_of(x, ids, heat, least, top, floor, most_id)
        below = tl.where(weight > 0, top - _scaled(start, first, vocab_size, heat, BLOCK), 0.0)
        total += weight
        spread += (weight.to(tl.float64) * below.to(tl.float64)).to(tl.int64)
    tl.store(tops + row, top)
    tl.store(floors + row, floor)
    tl.store(likeliest + row, most_id)
    tl.store(totals + row, tl.sum(total, axis=0))
    tl.store(spreads + row, tl.sum(spread, axis=0))
