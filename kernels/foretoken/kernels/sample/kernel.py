"""Triton kernels of sampling; see the package for the contract.

Nothing is sorted and no threshold is searched for. The best perturbed id of a superset of the survivors is drawn, then
tested: it survives if the ids above it are too few (top_k) and too light (top_p). If not, neither does anything below
it, and the best of what is above it is drawn. The first draw passes with about the probability top_p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from foretoken.kernels.noise import COUPLED
from foretoken.kernels.sample.narrowing import by_word, load_listed, narrow, relative_error
from foretoken.kernels.triton_math import EXACT, exp_f32, gumbel_f32, noise_words

_DRAWN_GROUPS = 16
_TESTED_GROUPS = 32
_MIN_PROGRAMS = 768  # what fills a large GPU when few rows are drawn
_MAX_SPLITS = 64


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`sample.sample` for validated tensors."""
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return out
    left = narrow(logits, temperature, top_k, top_p, min_p, keeps_top_k=False)
    num_groups = left.groups.shape[1]
    num_splits = min(triton.cdiv(_MIN_PROGRAMS, num_rows), triton.cdiv(num_groups, _DRAWN_GROUPS), _MAX_SPLITS)
    scores = torch.empty((num_rows, num_splits), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, num_splits), dtype=torch.int32, device=logits.device)
    rows = (logits, seeds, positions, temperature, min_p, left.groups, left.counts, left.largest, left.floor)
    _draw[(num_splits, num_rows)](
        *rows, scores, ids, vocab_size, num_groups, num_splits, GROUPS=_DRAWN_GROUPS, num_warps=4, **EXACT
    )
    _decide[(num_rows,)](
        *rows,
        left.mass,
        top_k,
        top_p,
        scores,
        ids,
        out,
        vocab_size,
        num_groups,
        num_splits,
        GROUPS=_TESTED_GROUPS,
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=4,
        **EXACT,
    )
    return out


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """`sample.greedy` for validated tensors."""
    num_rows = logits.shape[0]
    integers = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    zeros = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
    top_k = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    return sample(logits, integers, integers, zeros, top_k, zeros, zeros)


@triton.jit
def _draw(
    logits,  # [R, V]
    seeds,  # [R] int64
    positions,  # [R] int64
    temperature,  # [R] float32
    min_p,  # [R] float32
    groups,  # [R, G] int32
    counts,  # [R] int32
    largest,  # [R] float32
    floor,  # [R] float32
    scores,  # [R, D] float32, out: the best perturbed logit of each split, -inf for none
    ids,  # [R, D] int32, out
    vocab_size,
    num_groups,
    num_splits,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(0)
    best, best_id = _best(
        logits + row * vocab_size,
        tl.load(seeds + row),
        tl.load(positions + row),
        tl.load(temperature + row),
        tl.load(min_p + row),
        tl.load(largest + row),
        tl.load(floor + row),
        groups,
        row,
        tl.load(counts + row),
        vocab_size,
        num_groups,
        split * GROUPS,
        num_splits * GROUPS,
        GROUPS,
    )
    tl.store(scores + row * num_splits + split, best)
    tl.store(ids + row * num_splits + split, best_id)


@triton.jit
def _decide(
    logits,  # [R, V]
    seeds,  # [R] int64
    positions,  # [R] int64
    temperature,  # [R] float32
    min_p,  # [R] float32
    groups,  # [R, G] int32
    counts,  # [R] int32
    largest,  # [R] float32
    floor,  # [R] float32
    mass,  # [R] float32
    top_k,  # [R] int32
    top_p,  # [R] float32
    scores,  # [R, D] float32
    ids,  # [R, D] int32
    out,  # [R] int64, out
    vocab_size,
    num_groups,
    num_splits,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    score = tl.load(scores + row * num_splits + split, mask=split < num_splits, other=float("-inf"))
    drawn = tl.load(ids + row * num_splits + split, mask=split < num_splits, other=0x7FFFFFFF)
    token = tl.min(tl.where(score == tl.max(score, axis=0), drawn, 0x7FFFFFFF), axis=0)

    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    has_top_k = (heat > 0.0) & (k > 0) & (k < vocab_size)
    has_top_p = (heat > 0.0) & (p < 1.0)
    if has_top_k | has_top_p:
        start = logits + row * vocab_size
        count = tl.load(counts + row)
        most = tl.load(largest + row)
        top = tl.div_rn(most, heat)
        bound = p * tl.load(mass + row)
        doubt = bound * 2.0 * relative_error(most, heat) + vocab_size * 9.094947017729282e-13  # 2^-40 an id
        total = tl.full([], -1, tl.int64)  # -1: not known exactly
        if has_top_k & has_top_p:
            kth = _kth_key(start, heat, k, top, groups, row, count, vocab_size, num_groups, GROUPS)
            _, total = _above(start, heat, top, kth - 1, groups, row, count, vocab_size, num_groups, GROUPS)
        is_dropped = True
        while is_dropped:
            x = tl.load(start + token).to(tl.float32)
            key = _key(tl.div_rn(x, heat))
            num_above, above = _above(start, heat, top, key, groups, row, count, vocab_size, num_groups, GROUPS)
            share = above.to(tl.float32) * 9.094947017729282e-13
            if has_top_p & (total < 0) & (tl.abs(share - bound) <= doubt):
                total = _total(start, heat, top, vocab_size)
            is_light = share < bound
            if total >= 0:
                is_light = above.to(tl.float64) < p.to(tl.float64) * total.to(tl.float64)
            is_dropped = (has_top_k & (num_above >= k)) | (has_top_p & (is_light == 0))
            if is_dropped:
                _, token = _best(
                    start,
                    tl.load(seeds + row),
                    tl.load(positions + row),
                    heat,
                    tl.load(min_p + row),
                    most,
                    x,
                    groups,
                    row,
                    count,
                    vocab_size,
                    num_groups,
                    0,
                    GROUPS,
                    GROUPS,
                )
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _best(
    start,  # the row's logits
    seed,
    position,
    heat,
    least,
    most,
    floor,
    groups,
    row,
    count,
    vocab_size,
    num_groups,
    first,
    step,
    GROUPS: tl.constexpr,
):
    """The best perturbed logit above `floor`, min_p applied, and its id, over listed groups first, first + step, ..."""
    best = tl.full([GROUPS, 16, 2, 2], float("-inf"), tl.float32)
    best_id = tl.full([GROUPS, 16, 2, 2], 0x7FFFFFFF, tl.int32)
    divisor = tl.where(heat > 0.0, heat, 1.0)
    for place in range(first, count, step):
        x, ids, call = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
        word0, word1, word2, word3 = noise_words(seed, position, COUPLED_STREAM, call)
        score = x + heat * gumbel_f32(by_word(word0, word1, word2, word3))
        is_kept = x > floor
        if (heat > 0.0) & (least > 0.0):
            is_kept = is_kept & (exp_f32(tl.div_rn(x, divisor) - tl.div_rn(most, divisor)) >= least)
        is_better = is_kept & ((score > best) | ((score == best) & (ids < best_id)))
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)
    highest = tl.max(best)
    return highest, tl.min(tl.where(best == highest, best_id, 0x7FFFFFFF))


COUPLED_STREAM: tl.constexpr = tl.constexpr(COUPLED)


@triton.jit
def _key(scaled):
    """Integers in the order of the floats they stand for; both zeros are one."""
    bits = (scaled + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(scaled, top):
    """The integer weight of `reference.WEIGHT_ONE`."""
    return (exp_f32(scaled - top) * 1099511627776.0).to(tl.int64)


@triton.jit
def _above(start, heat, top, key, groups, row, count, vocab_size, num_groups, GROUPS: tl.constexpr):
    """How many listed ids lie above a key, and their weight."""
    number = tl.zeros([GROUPS, 16, 2, 2], tl.int32)
    weight = tl.zeros([GROUPS, 16, 2, 2], tl.int64)
    for place in range(0, count, GROUPS):
        x, _, _ = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
        scaled = tl.div_rn(x, heat)
        is_above = (_key(scaled) > key) & (x > float("-inf"))
        number += is_above.to(tl.int32)
        weight += tl.where(is_above, _weight(scaled, top), 0)
    return tl.sum(number), tl.sum(weight)


@triton.jit
def _kth_key(start, heat, k, top, groups, row, count, vocab_size, num_groups, GROUPS: tl.constexpr):
    """The key of the k-th largest quotient: bisection between keys that occur."""
    low = tl.full([], -2139095041, tl.int32)  # the key of -inf
    high = _key(top)
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        number = tl.zeros([GROUPS, 16, 2, 2], tl.int32)
        next_above = tl.full([GROUPS, 16, 2, 2], 0x7FFFFFFF, tl.int32)
        next_below = tl.full([GROUPS, 16, 2, 2], -2139095041, tl.int32)
        for place in range(0, count, GROUPS):
            x, _, _ = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
            key = _key(tl.div_rn(x, heat))
            is_above = key > middle
            number += is_above.to(tl.int32)
            next_above = tl.where(is_above, tl.minimum(next_above, key), next_above)
            next_below = tl.where(is_above, next_below, tl.maximum(next_below, key))
        if tl.sum(number) >= k:
            low = tl.min(next_above)
        else:
            high = tl.max(next_below)
    return high


@triton.jit
def _total(start, heat, top, vocab_size):
    """The weight of the whole row: read only where the approximate sum leaves a doubt."""
    weight = tl.zeros([1024], tl.int64)
    for first in range(0, vocab_size, 1024):
        ids = first + tl.arange(0, 1024)
        x = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        weight += _weight(tl.div_rn(x, heat), top)
    return tl.sum(weight, axis=0)
