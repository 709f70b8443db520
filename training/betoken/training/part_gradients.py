"""Gradients and losses of batches, a part at a time, of a module that sums its loss over a part's tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from betoken.training.batches import Rows, pad
from betoken.training.loop import Step
from betoken.training.models import product_dtype
from betoken.training.samples import Sample

PART_TOKENS = 2048  # tried for the pair: activations then stay in the cache

SummedLoss = Callable[[Rows], torch.Tensor]


def autocast(device: torch.device) -> Any:
    """Matrix products in the faster of bfloat16 and float32."""
    uses_bfloat16 = product_dtype(device.type) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=uses_bfloat16)


def gradients_of(trainee: SummedLoss, rows: Rows) -> Step:
    """Add the gradients of a batch's mean loss."""
    num_learnt = rows.num_learnt
    total = 0.0
    for part in rows.parts(PART_TOKENS):
        with autocast(part.ids.device):
            loss = trainee(part) / num_learnt
        torch.autograd.backward(loss)
        total += loss.item()
    return Step(total, num_learnt)


@torch.no_grad()
def held_out_loss(trainee: Any, samples: Sequence[Sample], device: torch.device) -> float:
    """Mean loss over the tokens of these samples."""
    trainee.eval()
    total, num_tokens = 0.0, 0
    for start in range(0, len(samples), 8):
        rows = pad(samples[start : start + 8]).to(device)
        with autocast(device):
            total += float(trainee(rows))
        num_tokens += rows.num_learnt
    trainee.train()
    return total / num_tokens
