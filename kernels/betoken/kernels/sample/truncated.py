"""Draft tokens with the distribution they were sampled from, few ids each; any device.

Speculative sampling by rejection is exact for the distribution a draft token was really sampled from. The distribution
reported here is the one to which the noise is applied.
"""

from __future__ import annotations

import torch

from betoken.kernels import checks, noise
from betoken.kernels.float_math import log
from betoken.kernels.sample.reference import argmax_rows
from betoken.kernels.weights import target_weights


def sample_truncated(
    logits: torch.Tensor,
    max_ids: int,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Samples every row from its `max_ids` most likely ids, with the drafter's own noise (stream 3).

    Args:
        max_ids: n, at least 1.
        logits, seeds, positions, temperature, top_k, top_p, min_p: as in `betoken.kernels.sample.sample`.
    Returns:
        token_ids [R] int64; ids [R, min(n, V)] int64, most likely first; probs [R, min(n, V)] float32 summing to 1,
        0 for ids that the filters removed.
    Raises:
        ValueError: a shape, stride, dtype or device other than above, or n below 1.
    """
    if max_ids < 1:
        raise ValueError(f"max_ids must be at least 1, got {max_ids}")
    checks.check_logits(logits)
    columns = (seeds, positions, temperature, top_k, top_p, min_p)
    checks.check_columns(logits, checks.NOISE_COLUMNS + checks.SAMPLING_COLUMNS, columns)
    weights = target_weights(logits, temperature, top_k, top_p, min_p).values
    kept, ids = weights.topk(min(max_ids, logits.shape[1]), dim=1)
    exact = kept.to(torch.float64)
    probs = (exact / exact.sum(dim=1, keepdim=True)).to(torch.float32)
    gumbel = noise.gumbel(seeds, positions, logits.shape[1], noise.DRAFTER).gather(1, ids)
    is_kept = probs > 0.0
    scores = (log(torch.where(is_kept, probs, 1.0)) + gumbel).masked_fill_(~is_kept, -torch.inf)
    return ids.gather(1, argmax_rows(scores).unsqueeze(1)).squeeze(1), ids, probs
