"""The processed target distribution as integers: 2^40 for a row's most likely id, 0 for ids that are filtered out.

Integer sums are the same in any order, so implementations that divide a row differently agree bit for bit. It knows no
noise and no drafts; the filters are the ones of `betoken.kernels.sample`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from betoken.kernels import float_math
from betoken.kernels.sample.reference import WEIGHT_ONE, argmax_rows, survivors


@dataclass(frozen=True, slots=True)
class Weights:
    """A row's probabilities are values / totals; what is less likely than 2^-40 of the most likely id counts as 0."""

    values: torch.Tensor  # [R, V] int64
    totals: torch.Tensor  # [R] int64, sums of the values
    below_top: torch.Tensor  # [R, V] float32, distance of the scaled logit below the row's largest; at least 0


def target_weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> Weights:
    """softmax(logits / T) after top_k, top_p and min_p; at T = 0 the lowest of the most likely ids has all weight.

    Arguments as in `betoken.kernels.sample.sample`, any device.
    """
    scores = logits.to(torch.float32)
    is_sampled = temperature > 0.0
    scaled = scores / torch.where(is_sampled, temperature, 1.0).unsqueeze(1)
    below_top = scaled.amax(dim=1, keepdim=True) - scaled
    values = (float_math.exp(-below_top) * WEIGHT_ONE).to(torch.int64)
    is_kept = survivors(scaled, top_k, top_p, min_p)
    if is_kept is not None:
        values *= is_kept
    greedy = torch.zeros_like(values).scatter_(1, argmax_rows(scores).unsqueeze(1), int(WEIGHT_ONE))
    values = torch.where(is_sampled.unsqueeze(1), values, greedy)
    return Weights(values, values.sum(dim=1), below_top)
