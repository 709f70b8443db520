"""Torch reference of speculative sampling by rejection; see the package for the contract."""

from __future__ import annotations

import torch

from betoken.kernels import noise
from betoken.kernels.float_math import log
from betoken.kernels.rejection.draft_probs import DraftProbs
from betoken.kernels.sample.reference import argmax_rows
from betoken.kernels.weights import target_weights


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
    """The rules of `betoken.kernels.rejection.rejection`, any device."""
    weights = target_weights(logits, temperature, top_k, top_p, min_p)
    # Probabilities are compared times the total, in float64 and in this order of operations.
    values, totals = weights.values.to(torch.float64), weights.totals.to(torch.float64)
    num_drafts, num_blocks = draft_ids.shape[0], offsets.shape[0] - 1
    lengths = offsets.diff()
    rows = torch.arange(num_drafts, device=logits.device)
    rows += torch.repeat_interleave(torch.arange(num_blocks, device=logits.device), lengths)
    uniform = noise.uniform(seeds, positions, 1, noise.ACCEPT)[:, 0].to(torch.float64)
    draft = _dense(draft_ids, draft_probs, logits.shape[1])
    chosen = values[rows, draft_ids]
    bound = uniform[rows] * draft.gather(1, draft_ids.unsqueeze(1)).squeeze(1) * totals[rows]
    num_accepted = count_leading((chosen > 0.0) & (bound <= chosen), offsets)

    is_refused = num_accepted < lengths
    next_ids = target_ids[offsets[1:] + torch.arange(num_blocks, device=logits.device)]
    refused = (offsets[:-1] + num_accepted)[is_refused]
    at = rows[refused]
    residual = values[at] - draft[refused] * totals[at].unsqueeze(1)
    # Draft probabilities that add up to more than 1 may leave nothing: then the target's own are used.
    residual = torch.where((residual > 0.0).any(dim=1, keepdim=True), residual, values[at]).to(torch.float32)
    is_left = residual > 0.0
    gumbel = noise.gumbel(seeds[at], positions[at], logits.shape[1], noise.RECOVERED)
    scores = log(torch.where(is_left, residual, 1.0)) + gumbel
    next_ids[is_refused] = argmax_rows(scores.masked_fill_(~is_left, -torch.inf))
    return num_accepted, next_ids


def count_leading(is_accepted: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Number of leading true values of each block: [N] bool, [B + 1] int64 -> [B] int64."""
    flags, bounds = is_accepted.tolist(), offsets.tolist()
    counts = [
        next((i for i in range(end - start) if not flags[start + i]), end - start)
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.tensor(counts, dtype=torch.int64, device=offsets.device)


def _dense(draft_ids: torch.Tensor, draft_probs: DraftProbs, vocab_size: int) -> torch.Tensor:
    """[N, V] float64 draft distributions, one-hot if none was given."""
    num_probs = draft_probs.offsets.diff()
    dense = torch.zeros((draft_ids.shape[0], vocab_size), dtype=torch.float64, device=draft_ids.device)
    owners = torch.repeat_interleave(torch.arange(draft_ids.shape[0], device=draft_ids.device), num_probs)
    dense[owners, draft_probs.ids] = draft_probs.probs.to(torch.float64)
    is_certain = num_probs == 0
    dense[is_certain, draft_ids[is_certain]] = 1.0
    return dense
