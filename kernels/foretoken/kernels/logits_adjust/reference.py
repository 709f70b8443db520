"""Torch reference of the logits adjustment; see the package for the contract."""

from __future__ import annotations

import torch


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """The rules of `foretoken.kernels.logits_adjust.logits_adjust`, any device."""
    num_rows, vocab_size = logits.shape
    adjusted = logits.to(torch.float32, copy=True)
    rows = torch.repeat_interleave(torch.arange(num_rows, device=logits.device), row_offsets.diff())
    flat = adjusted.view(-1)
    places = rows * vocab_size + ids
    value = flat[places] + bias
    value = torch.where(value < 0.0, value * scale, value / scale) - penalty
    flat[places] = value
    if allowed is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = ((allowed.unsqueeze(2) >> bits) & 1).view(num_rows, -1)[:, :vocab_size]
        adjusted.masked_fill_(is_allowed == 0, -torch.inf)
    return adjusted
