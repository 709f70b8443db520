"""Typical acceptance in Triton: one program judges a draft token; see the package for the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.sample.reference import WEIGHT_ONE
from betoken.kernels.triton_math import EXACT, exp_f32
from betoken.kernels.weights_kernel import row_weights, weight_at

_WEIGHT_ONE: tl.constexpr = tl.constexpr(float(WEIGHT_ONE))


def typical(
    logits: torch.Tensor,
    rows: torch.Tensor,
    draft_ids: torch.Tensor,
    epsilon: torch.Tensor,
    delta: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`typical.typical` for validated tensors."""
    num_drafts = draft_ids.shape[0]
    is_accepted = torch.empty(num_drafts, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_drafts, dtype=torch.int64, device=logits.device)
    found = row_weights(logits, temperature, top_k, top_p, min_p)
    if num_drafts > 0:
        _typical[(num_drafts,)](
            logits,
            rows,
            draft_ids,
            epsilon,
            delta,
            temperature,
            min_p,
            found.tops,
            found.floors,
            found.likeliest,
            found.totals,
            found.spreads,
            is_accepted,
            weights,
            logits.shape[1],
            num_warps=1,
            **EXACT,
        )
    return is_accepted.bool(), weights.to(torch.float64) / found.totals[rows].to(torch.float64)


@triton.jit
def _typical(
    logits,  # [R, V]
    rows,  # [N] int64
    draft_ids,  # [N] int64
    epsilon,  # [R] float32
    delta,  # [R] float32
    temperature,  # [R] float32
    min_p,  # [R] float32
    tops,  # [R] float32
    floors,  # [R] int64
    likeliest,  # [R] int32
    totals,  # [R] int64
    spreads,  # [R] int64
    is_accepted,  # [N] int32, out
    weights,  # [N] int64, out
    vocab_size,
):
    node = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + node)
    draft_id = tl.load(draft_ids + node)
    weight = weight_at(logits, row, draft_id, temperature, min_p, tops, floors, likeliest, vocab_size)
    total = tl.load(totals + row).to(tl.float64) + tl.zeros([1], tl.float64)
    mean_below = (tl.load(spreads + row).to(tl.float64) / total).to(tl.float32)
    scaled_delta = tl.load(delta + row).to(tl.float64) * _WEIGHT_ONE
    entropy_bound = exp_f32(-mean_below).to(tl.float64) * scaled_delta
    bound = tl.minimum(total * tl.load(epsilon + row).to(tl.float64), entropy_bound)
    tl.store(is_accepted + node, tl.sum((weight.to(tl.float64) > bound).to(tl.int32), axis=0))
    tl.store(weights + node, tl.sum(weight.to(tl.int64), axis=0))
