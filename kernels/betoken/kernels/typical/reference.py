"""Torch reference of typical acceptance; see the package for the contract."""

from __future__ import annotations

import torch

from betoken.kernels.float_math import exp
from betoken.kernels.sample.reference import WEIGHT_ONE
from betoken.kernels.weights import target_weights


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
    """The rules of `betoken.kernels.typical.typical`, any device."""
    weights = target_weights(logits, temperature, top_k, top_p, min_p)
    values, totals = weights.values.to(torch.float64), weights.totals.to(torch.float64)
    # With weight w = 2^40 exp(-b), -log(w / total) = b + log(total / 2^40). The entropy is the mean of b plus that log,
    # which cancels when both sides of the rule are multiplied by the total. Terms are summed as integers.
    below_top = torch.where(weights.values > 0, weights.below_top, 0.0).to(torch.float64)
    mean_below = (values * below_top).to(torch.int64).sum(dim=1).to(torch.float64) / totals
    entropy_bound = delta.to(torch.float64) * WEIGHT_ONE * exp(-mean_below.to(torch.float32)).to(torch.float64)
    bound = torch.minimum(epsilon.to(torch.float64) * totals, entropy_bound)
    drafted = values[rows, draft_ids]
    return drafted > bound[rows], drafted / totals[rows]
