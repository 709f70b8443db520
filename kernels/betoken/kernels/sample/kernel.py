"""Triton kernels of sampling; see the package for the contract.

It neither sorts nor searches a threshold. The best perturbed id of a superset of the survivors is drawn, then tested.
It survives if the ids above it are too few (top_k) and too light (top_p). If not, neither does anything below it, and
the best of what is above it is drawn. The first draw passes with about the probability top_p.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.noise import COUPLED
from betoken.kernels.sample.narrowing import by_word, load_listed, narrow, relative_error
from betoken.kernels.sample.ranks import key_of, kth_key, weight_above, weight_of_row
from betoken.kernels.triton_math import EXACT, exp_f32, gumbel_f32, noise_words

COUPLED_STREAM: tl.constexpr = tl.constexpr(COUPLED)
NO_ID: tl.constexpr = tl.constexpr(0x7FFFFFFF)

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
        SPLITS=_MAX_SPLITS,
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


@triton.jit(do_not_specialize=["num_splits"])
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


@triton.jit(do_not_specialize=["num_splits"])
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
    drawn = tl.load(ids + row * num_splits + split, mask=split < num_splits, other=NO_ID)
    token = tl.min(tl.where(score == tl.max(score, axis=0), drawn, NO_ID), axis=0)
    weight = tl.load(mass + row)
    is_sound = weight == weight  # NaN: so is a logit, or the largest is infinite
    token = tl.where(is_sound & (token != NO_ID), token, 0)  # a valid id

    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    has_top_k = (heat > 0.0) & (k > 0) & (k < vocab_size)
    has_top_p = (heat > 0.0) & (p < 1.0)
    if is_sound & (has_top_k | has_top_p):
        start = logits + row * vocab_size
        count = tl.load(counts + row)
        most = tl.load(largest + row)
        top = tl.div_rn(most, heat)
        bound = p * weight
        doubt = bound * relative_error(most, heat) + vocab_size * 9.094947017729282e-13  # 2^-40 an id
        total = tl.full([], -1, tl.int64)  # -1: not known exactly
        if has_top_k & has_top_p:
            kth = kth_key(start, heat, k, top, groups, row, count, vocab_size, num_groups, GROUPS)
            _, total = weight_above(start, heat, top, kth - 1, groups, row, count, vocab_size, num_groups, GROUPS)
        is_dropped = True
        while is_dropped:
            x = tl.load(start + token).to(tl.float32)
            key = key_of(tl.div_rn(x, heat))
            num_above, above = weight_above(start, heat, top, key, groups, row, count, vocab_size, num_groups, GROUPS)
            share = above.to(tl.float32) * 9.094947017729282e-13
            if has_top_p & (total < 0) & (tl.abs(share - bound) <= doubt):
                total = weight_of_row(start, heat, top, vocab_size)
            is_light = share < bound
            if total >= 0:
                is_light = above.to(tl.float64) < p.to(tl.float64) * total.to(tl.float64)
            is_dropped = (has_top_k & (num_above >= k)) | (has_top_p & (is_light == 0))
            if is_dropped:
                _, above_id = _best(
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
                is_dropped = above_id != NO_ID  # always, but for NaN: it must not loop forever
                token = tl.where(is_dropped, above_id, token)
    tl.store(out + row, tl.where(is_sound, token, -1).to(tl.int64))


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
    best_id = tl.full([GROUPS, 16, 2, 2], NO_ID, tl.int32)
    divisor = tl.where(heat > 0.0, heat, 1.0)
    place = first
    while place < count:
        x, ids, call = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
        word0, word1, word2, word3 = noise_words(seed, position, COUPLED_STREAM, call)
        score = x + heat * gumbel_f32(by_word(word0, word1, word2, word3))
        is_kept = x > floor
        if (heat > 0.0) & (least > 0.0):
            is_kept = is_kept & (exp_f32(tl.div_rn(x, divisor) - tl.div_rn(most, divisor)) >= least)
        is_better = is_kept & ((score > best) | ((score == best) & (ids < best_id)))
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)
        place += step
    highest = tl.max(best)
    return highest, tl.min(tl.where(best == highest, best_id, NO_ID))
