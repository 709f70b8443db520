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
PART_SCORES = 1 << 24
"""Most scores of a part whose loss lays them out, over the whole vocabulary."""

SummedLoss = Callable[[Rows], torch.Tensor]


def autocast(device: torch.device) -> Any:
    """Matrix products in the faster of bfloat16 and float32."""
    uses_bfloat16 = product_dtype(device.type) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=uses_bfloat16)


def part_tokens(vocab_size: int) -> int:
    """Tokens of a part if a loss holds scores over `vocab_size` ids; at least one sequence makes a part."""
    return max(1, min(PART_TOKENS, PART_SCORES // vocab_size))


def gradients_of(trainee: SummedLoss, rows: Rows, max_tokens: int = PART_TOKENS) -> Step:
    """Add the gradients of a batch's mean loss, `max_tokens` at a time."""
    num_learnt = rows.num_learnt
    total = 0.0
    for part in rows.parts(max_tokens):
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
