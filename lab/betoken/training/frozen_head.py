"""Cross-entropy through an output layer that stays as it is, a few rows at a time.

Scores of all rows over a large vocabulary are never in memory at once: each piece leaves the gradient of its inputs
and goes. It knows no model and no drafter.
"""

from __future__ import annotations

from typing import Any

import torch

_PIECE_SCORES = 1 << 23
"""Scores of a piece; tried on CPU with 49152 ids: 170 rows are as fast as any number, and a third faster than all."""


def frozen_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropies of labels [N] under scores `hidden @ weight.T`; gradients go to `hidden` alone.

    Args:
        hidden: [N, H].
        weight: [V, H], in whose type the products are made.
    """
    loss: torch.Tensor = _FrozenCrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    return loss


class _FrozenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        size = max(1, _PIECE_SCORES // len(weight))
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                chosen = slice(start, start + size)
                wanted = labels[chosen, None]
                log_probs = (hidden[chosen].to(weight.dtype) @ weight.T).float().log_softmax(-1)
                total -= log_probs.gather(1, wanted).sum()
                if gradient is not None:
                    shares = log_probs.exp_()
                    shares.scatter_add_(1, wanted, torch.full_like(wanted, -1, dtype=shares.dtype))
                    gradient[chosen] = (shares.to(weight.dtype) @ weight).to(hidden.dtype)
        ctx.gradient = gradient
        return total

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradient * outer[0], None, None
