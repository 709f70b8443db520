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
) -> None:
    """The rules of `betoken.kernels.logits_adjust.logits_adjust`, any device."""
    num_rows, vocab_size = logits.shape
    check_entries(row_offsets, ids, vocab_size)
    rows = torch.repeat_interleave(torch.arange(num_rows, device=logits.device), row_offsets.diff())
    flat = logits.view(-1)
    places = rows * vocab_size + ids
    value = flat[places] + bias
    value = torch.where(value < 0.0, value * scale, value / scale) - penalty
    flat[places] = value
    if allowed is not None:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = ((allowed.unsqueeze(2) >> bits) & 1).view(num_rows, -1)[:, :vocab_size]
        logits.masked_fill_(is_allowed == 0, -torch.inf)


def check_entries(row_offsets: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> None:
    """Refuses offsets and ids that would reach outside a row.

    Raises:
        ValueError: an offset or an id is out of range.
    """
    num_entries = ids.shape[0]
    if int(row_offsets[0]) != 0 or int(row_offsets[-1]) != num_entries or bool((row_offsets.diff() < 0).any()):
        raise ValueError(f"row_offsets must go from 0 to {num_entries} without decreasing")
    if num_entries > 0 and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(f"ids must be 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
