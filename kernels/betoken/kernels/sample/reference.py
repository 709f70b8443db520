"""Torch reference of sampling; see the package for the contract."""

from __future__ import annotations

import numpy as np
import torch

from betoken.kernels import float_math, noise

# Probabilities are summed as integers, 2^40 for the most likely id: the sum is the same in any order.
WEIGHT_ONE = 2.0**40


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """The rules of `betoken.kernels.sample.sample`, any device."""
    ids = argmax_rows(perturb(logits, seeds, positions, temperature, top_k, top_p, min_p))
    return _where_finite(logits.amax(dim=1), ids)


def perturb(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Perturbed logits, whose maximum is the token: logits + temperature * noise, -inf for filtered ids; a new [R, V]
    float32."""
    scores = logits.to(torch.float32, copy=True)
    is_sampled = temperature > 0.0
    if bool(is_sampled.any()):
        # A greedy row passes through with neutral filters and noise times 0.
        divisor = torch.where(is_sampled, temperature, 1.0)
        is_kept = survivors(
            scores / divisor.unsqueeze(1),
            torch.where(is_sampled, top_k, 0),
            torch.where(is_sampled, top_p, 1.0),
            torch.where(is_sampled, min_p, 0.0),
        )
        gumbel = noise.gumbel(seeds, positions, logits.shape[1])
        scores += temperature.unsqueeze(1) * gumbel
        if is_kept is not None:
            scores.masked_fill_(~is_kept, -torch.inf)
    return scores


def perturbed_top(
    logits: torch.Tensor,
    num_top: int,
    scale: float,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rules of `betoken.kernels.sample.perturbed.perturbed_top`, any device."""
    scores = perturb(logits, seeds, positions, temperature, top_k, top_p, min_p)
    total = (scores / scale).logsumexp(dim=1, keepdim=True)
    ids, best = [], []
    for _ in range(min(num_top, logits.shape[1])):  # few: cheaper than sorting, and equals have an order
        ids.append(argmax_rows(scores).unsqueeze(1))
        best.append(scores.gather(1, ids[-1]))
        scores.scatter_(1, ids[-1], -torch.inf)
    return torch.cat(ids, dim=1), (torch.cat(best, dim=1) / scale - total).clamp_max_(0.0)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The rules of `betoken.kernels.sample.greedy`, any device."""
    scores = logits.to(torch.float32)
    ids = argmax_rows(scores)
    if scores.device.type != "cpu":
        return _where_finite(scores.amax(dim=1), ids)
    largest = scores.numpy()[np.arange(len(ids)), ids.numpy()]  # NaN counts as the largest there
    return ids if np.isfinite(largest).all() else _where_finite(torch.from_numpy(largest), ids)


def _where_finite(largest: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The ids [R], -1 if the row's largest logit is NaN or infinite."""
    return torch.where(largest.isfinite(), ids, -1)


def argmax_rows(scores: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value, the lowest among equals: [R, V] float32 -> [R] int64."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=1))  # 8 times faster than torch on CPU
    is_largest = scores == scores.amax(dim=1, keepdim=True)  # argmax leaves open which of equals it takes
    ids = torch.arange(scores.shape[1], device=scores.device)
    return torch.where(is_largest, ids, scores.shape[1]).amin(dim=1)


def descending_rows(scores: torch.Tensor) -> torch.Tensor:
    """Each row's values from the largest down: [R, V] float32."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)  # 20 times faster than torch on CPU
    return scores.sort(dim=1, descending=True).values


def survivors(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor | None:
    """Which ids pass top_k, then top_p, then min_p: [R, V] bool, None for all. `scaled` is logits / temperature."""
    has_rank_filter = bool(((top_k > 0) | (top_p < 1.0)).any())
    has_min_p = bool((min_p > 0.0).any())
    is_kept = None
    if has_rank_filter:
        is_kept = scaled >= _rank_threshold(scaled, top_k, top_p)
    if has_min_p:
        # Probabilities relative to the largest: the normaliser cancels, whatever was filtered before.
        likely = float_math.exp(scaled - scaled.amax(dim=1, keepdim=True)) >= min_p.unsqueeze(1)
        is_kept = likely if is_kept is None else is_kept & likely
    return is_kept


def _rank_threshold(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest scaled logit that passes top_k and top_p: [R, 1]; ids tied with it stay."""
    vocab_size = scaled.shape[1]
    descending = descending_rows(scaled)
    last = torch.where(top_k > 0, top_k, vocab_size).clamp_max(vocab_size) - 1
    kth_largest = descending.gather(1, last.to(torch.int64).unsqueeze(1))
    in_top_k = descending >= kth_largest
    weights = (float_math.exp(descending - descending[:, :1]) * WEIGHT_ONE).to(torch.int64) * in_top_k
    sums = weights.cumsum(dim=1)
    # An id stays while what is ranked above it has not reached top_p of the top_k survivors' total.
    bound = top_p.to(torch.float64).unsqueeze(1) * sums[:, -1:].to(torch.float64)
    in_top_p = ((sums - weights).to(torch.float64) < bound) | (top_p >= 1.0).unsqueeze(1)
    num_kept = (in_top_k & in_top_p).sum(dim=1, keepdim=True)
    return descending.gather(1, (num_kept - 1).clamp_min_(0))
