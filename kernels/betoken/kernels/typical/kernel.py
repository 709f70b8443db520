"""Typical acceptance in Triton: one program walks a block; see the package for the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.sample.reference import WEIGHT_ONE
from betoken.kernels.triton_math import EXACT, exp_f32
from betoken.kernels.typical import reference
from betoken.kernels.weights_kernel import row_weights, weight_at

_EPSILON: tl.constexpr = tl.constexpr(reference.EPSILON)
_SCALED_DELTA: tl.constexpr = tl.constexpr(reference.DELTA * WEIGHT_ONE)


def typical(
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    draft_ids: torch.Tensor,
    offsets: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`typical.typical` for validated tensors."""
    num_blocks = offsets.shape[0] - 1
    num_accepted, next_ids = (torch.empty(num_blocks, dtype=torch.int64, device=logits.device) for _ in range(2))
    if num_blocks > 0:
        rows = row_weights(logits, temperature, top_k, top_p, min_p)
        _typical[(num_blocks,)](
            logits,
            target_ids,
            draft_ids,
            offsets,
            temperature,
            min_p,
            rows.tops,
            rows.floors,
            rows.likeliest,
            rows.totals,
            rows.spreads,
            num_accepted,
            next_ids,
            logits.shape[1],
            num_warps=1,
            **EXACT,
        )
    return num_accepted, next_ids


@triton.jit
def _typical(
    logits,  # [R, V]
    target_ids,  # [R] int64
    draft_ids,  # [N] int64
    offsets,  # [B + 1] int64
    temperature,  # [R] float32
    min_p,  # [R] float32
    tops,  # [R] float32
    floors,  # [R] int64
    likeliest,  # [R] int32
    totals,  # [R] int64
    spreads,  # [R] int64
    num_accepted,  # [B] int64, out
    next_ids,  # [B] int64, out
    vocab_size,
):
    block = tl.program_id(0).to(tl.int64)
    start = tl.load(offsets + block)
    stop = tl.load(offsets + block + 1)
    node = start
    while node < stop:
        row = node + block
        draft_id = tl.load(draft_ids + node)
        weight = weight_at(logits, row, draft_id, temperature, min_p, tops, floors, likeliest, vocab_size)
        total = tl.load(totals + row).to(tl.float64) + tl.zeros([1], tl.float64)
        mean_below = (tl.load(spreads + row).to(tl.float64) / total).to(tl.float32)
        bound = tl.minimum(total * _EPSILON, exp_f32(-mean_below).to(tl.float64) * _SCALED_DELTA)
        if tl.sum((weight.to(tl.float64) > bound).to(tl.int32), axis=0) > 0:
            node += 1
        else:
            stop = node
    tl.store(num_accepted + block, stop - start)
    tl.store(next_ids + block, tl.load(target_ids + stop + block))
