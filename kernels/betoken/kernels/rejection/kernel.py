"""Speculative sampling by rejection in Triton: one program walks a block and recovers; see the package."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels import noise
from betoken.kernels.rejection.draft_probs import MAX_DRAFT_PROBS, DraftProbs
from betoken.kernels.sample.narrowing import by_word
from betoken.kernels.triton_math import EXACT, gumbel_f32, log_f32, noise_words, token_id
from betoken.kernels.weights_kernel import row_weights, weight_at, weight_of

_CALLS = 256
_ACCEPT: tl.constexpr = tl.constexpr(noise.ACCEPT)
_RECOVERED: tl.constexpr = tl.constexpr(noise.RECOVERED)


def rejection(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    offsets: torch.Tensor,
    draft_probs: DraftProbs,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rejection.rejection` for validated tensors."""
    num_blocks = offsets.shape[0] - 1
    num_accepted, next_ids = (torch.empty(num_blocks, dtype=torch.int64, device=logits.device) for _ in range(2))
    if num_blocks > 0:
        rows = row_weights(logits, temperature, top_k, top_p, min_p)
        _reject[(num_blocks,)](
            logits,
            target_ids,
            draft_ids,
            offsets,
            draft_probs.offsets,
            draft_probs.ids,
            draft_probs.probs,
            seeds,
            positions,
            temperature,
            min_p,
            rows.tops,
            rows.floors,
            rows.likeliest,
            rows.totals,
            num_accepted,
            next_ids,
            logits.shape[1],
            CALLS=_CALLS,
            PROBS=MAX_DRAFT_PROBS,
            num_warps=4,
            **EXACT,
        )
    return num_accepted, next_ids


@triton.jit
def _reject(
    logits,  # [R, V]
    target_ids,  # [R] int64
    draft_ids,  # [N] int64
    offsets,  # [B + 1] int64
    prob_offsets,  # [N + 1] int64
    prob_ids,  # [M] int64
    probs,  # [M] float32
    seeds,  # [R] int64
    positions,  # [R] int64
    temperature,  # [R] float32
    min_p,  # [R] float32
    tops,  # [R] float32
    floors,  # [R] int64
    likeliest,  # [R] int32
    totals,  # [R] int64
    num_accepted,  # [B] int64, out
    next_ids,  # [B] int64, out
    vocab_size,
    CALLS: tl.constexpr,
    PROBS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + block)
    end = tl.load(offsets + block + 1)
    node = start
    stop = end  # end of the walk: the first rejected node, or beyond the last
    while node < stop:
        row = node + block
        draft_id = tl.load(draft_ids + node)
        weight = weight_at(logits, row, draft_id, temperature, min_p, tops, floors, likeliest, vocab_size)
        first_prob = tl.load(prob_offsets + node)
        num_probs = tl.load(prob_offsets + node + 1) - first_prob
        ids, shares = _draft_probs(draft_id, prob_ids + first_prob, probs + first_prob, num_probs, tl.arange(0, PROBS))
        share = tl.sum(tl.where(ids == draft_id, shares, 0.0), axis=0)
        call = tl.zeros([1], tl.int32)
        word, _, _, _ = noise_words(tl.load(seeds + row), tl.load(positions + row), _ACCEPT, call)
        uniform = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2^-32, 2^-33
        bound = uniform.to(tl.float64) * share.to(tl.float64) * tl.load(totals + row).to(tl.float64)
        is_accepted = (weight > 0) & (bound <= weight.to(tl.float64))
        if tl.sum(is_accepted.to(tl.int32), axis=0) > 0:
            node += 1
        else:
            stop = node
    row = stop + block
    next_id = tl.load(target_ids + row)
    if stop < end:
        draft_id = tl.load(draft_ids + stop)
        first_prob = tl.load(prob_offsets + stop)
        num_probs = tl.load(prob_offsets + stop + 1) - first_prob
        total = tl.load(totals + row).to(tl.float64)
        recovered = tl.full([], 0x7FFFFFFF, tl.int32)
        # Draft probabilities that add up to more than 1 may leave nothing: then the target's own are used.
        for _ in range(2):
            if recovered == 0x7FFFFFFF:
                recovered = _recover(
                    logits + row * vocab_size,
                    draft_id,
                    prob_ids + first_prob,
                    probs + first_prob,
                    num_probs,
                    total,
                    tl.load(seeds + row),
                    tl.load(positions + row),
                    tl.load(temperature + row),
                    tl.load(min_p + row),
                    tl.load(tops + row),
                    tl.load(floors + row),
                    tl.load(likeliest + row),
                    vocab_size,
                    CALLS,
                    PROBS,
                )
                total = total * 0.0
        next_id = recovered.to(tl.int64)
    tl.store(num_accepted + block, stop - start)
    tl.store(next_ids + block, next_id)


@triton.jit
def _draft_probs(draft_id, prob_ids, probs, num_probs, place):
    """Ids and probabilities at these places of a draft token's distribution, -1 and 0 beyond its end."""
    ids = tl.load(prob_ids + place, mask=place < num_probs, other=-1)
    shares = tl.load(probs + place, mask=place < num_probs, other=0.0)
    is_certain = (num_probs == 0) & (place == 0)
    return tl.where(is_certain, draft_id, ids), tl.where(is_certain, 1.0, shares)


@triton.jit
def _recover(
    start,  # the row's logits
    draft_id,
    prob_ids,  # [num_probs] int64
    probs,  # [num_probs] float32
    num_probs,
    total,  # what a draft's probability of 1 takes away
    seed,
    position,
    heat,
    least,
    top,
    floor,
    likeliest,
    vocab_size,
    CALLS: tl.constexpr,
    PROBS: tl.constexpr,
):
    """The id that wins under the weights left by the draft's, 2^31 - 1 if nothing is left."""
    draft_ids, _ = _draft_probs(draft_id, prob_ids, probs, num_probs, tl.arange(0, PROBS))
    best = tl.full([CALLS, 2, 2], float("-inf"), tl.float32)
    best_id = tl.full([CALLS, 2, 2], 0x7FFFFFFF, tl.int32)
    for first in range(0, tl.cdiv(vocab_size, 4 * CALLS) * CALLS, CALLS):
        call = first + tl.arange(0, CALLS)
        ids = token_id(call, 0)
        # Loaded word by word, as in `narrowing`: runs of ids, and the four of a call in the same thread.
        x0 = tl.load(start + ids, mask=ids < vocab_size, other=float("-inf"))
        x1 = tl.load(start + ids + 256, mask=ids + 256 < vocab_size, other=float("-inf"))
        x2 = tl.load(start + ids + 512, mask=ids + 512 < vocab_size, other=float("-inf"))
        x3 = tl.load(start + ids + 768, mask=ids + 768 < vocab_size, other=float("-inf"))
        ids = by_word(ids, ids + 256, ids + 512, ids + 768)
        word0, word1, word2, word3 = noise_words(seed, position, _RECOVERED, call)
        x = by_word(x0, x1, x2, x3).to(tl.float32)
        weight = weight_of(x, ids, heat, least, top, floor, likeliest).to(tl.float64)
        share = tl.zeros([CALLS, 2, 2], tl.float64)
        is_here = (draft_ids >= 4 * first) & (draft_ids < 4 * (first + CALLS))
        if tl.sum(is_here.to(tl.int32), axis=0) > 0:  # a loop: unrolled, it would take the compiler a minute
            for place in range(tl.maximum(num_probs, 1)):
                own_id, own_share = _draft_probs(draft_id, prob_ids, probs, num_probs, place)
                share = tl.where(ids == own_id, own_share.to(tl.float64), share)
        left = weight - share * total
        is_left = left > 0.0
        score = log_f32(tl.where(is_left, left, 1.0).to(tl.float32)) + gumbel_f32(by_word(word0, word1, word2, word3))
        is_better = is_left & (score > best)
        best = tl.where(is_better, score, best)
        best_id = tl.where(is_better, ids, best_id)
    highest = tl.max(best)
    return tl.min(tl.where(best == highest, best_id, 0x7FFFFFFF))
