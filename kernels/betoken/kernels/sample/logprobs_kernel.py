"""Triton kernel of the reported log-probabilities; see `logprobs` for the contract."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from betoken.kernels.sample.narrowing import load_listed, narrow
from betoken.kernels.triton_math import EXACT, log_f32

_GROUPS = 32


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`logprobs.token_logprobs` for validated tensors."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    top_ids = torch.empty((num_rows, num_top), dtype=torch.int64, device=device)
    top_logprobs = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    if num_rows == 0:
        return chosen, top_ids, top_logprobs
    logits = logits.contiguous()
    ones = torch.ones(num_rows, dtype=torch.float32, device=device)
    ranks = torch.full((num_rows,), num_top, dtype=torch.int32, device=device)
    left = narrow(logits, ones, ranks, ones, torch.zeros_like(ones), keeps_top_k=True)
    _rank[(num_rows,)](
        logits,
        token_ids.contiguous(),
        left.groups,
        left.counts,
        left.largest,
        left.mass,
        chosen,
        top_ids,
        top_logprobs,
        num_top,
        vocab_size,
        left.groups.shape[1],
        GROUPS=_GROUPS,
        num_warps=4,
        **EXACT,
    )
    return chosen, top_ids, top_logprobs


@triton.jit(do_not_specialize=["num_top"])
def _rank(
    logits,  # [R, V]
    token_ids,  # [R] int64
    groups,  # [R, G] int32
    counts,  # [R] int32
    largest,  # [R] float32
    mass,  # [R] float32
    chosen,  # [R] float32, out
    top_ids,  # [R, n] int64, out
    top_logprobs,  # [R, n] float32, out
    num_top,
    vocab_size,
    num_groups,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab_size
    most = tl.load(largest + row)
    log_mass = log_f32(tl.load(mass + row))
    count = tl.load(counts + row)
    tl.store(chosen + row, (tl.load(start + tl.load(token_ids + row)).to(tl.float32) - most) - log_mass)
    last = float("inf")
    last_id = -1
    rank = 0
    while rank < num_top:
        best = tl.full([GROUPS, 16, 2, 2], float("-inf"), tl.float32)
        best_id = tl.full([GROUPS, 16, 2, 2], 0x7FFFFFFF, tl.int32)
        place = 0
        while place < count:
            x, ids, _ = load_listed(start, groups, row, num_groups, place, count, vocab_size, GROUPS)
            logprob = (x - most) - log_mass
            is_next = (logprob < last) | ((logprob == last) & (ids > last_id))
            is_better = is_next & ((logprob > best) | ((logprob == best) & (ids < best_id)))
            best = tl.where(is_better, logprob, best)
            best_id = tl.where(is_better, ids, best_id)
            place += GROUPS
        last = tl.max(best)
        last_id = tl.min(tl.where(best == last, best_id, 0x7FFFFFFF))
        tl.store(top_ids + row * num_top + rank, last_id.to(tl.int64))
        tl.store(top_logprobs + row * num_top + rank, last)
        rank += 1
