"""Distillation: the draft learns the target's whole next-token distribution on the training text.

Knows two models and a batch; it knows no schedule. The vocabulary is small, so the divergence is taken over all of it.

Source: Hinton et al., arXiv:1503.02531; forward divergence for drafts: Zhou et al., arXiv:2310.08461.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from betoken.training.models import logits_of
from betoken.training.train import LossFunction

CROSS_ENTROPY_WEIGHT = 0.1


def forward_divergence(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || draft) in nats over all positions of `[B, T, V]` logits."""
    target_log_probs = target_logits.float().log_softmax(-1).flatten(0, 1)
    draft_log_probs = draft_logits.float().log_softmax(-1).flatten(0, 1)
    return F.kl_div(draft_log_probs, target_log_probs, reduction="batchmean", log_target=True)


Divergence = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(target logits [N, V], draft logits [N, V]) -> nats, or for total variation a share, at every place [N]."""


def forward_kl(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """KL(target || draft)."""
    target, draft = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """KL(draft || target)."""
    return forward_kl(draft_logits, target_logits)


def jensen_shannon(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """The mean of both divergences from the mean of the distributions."""
    target, draft = target_logits.float().log_softmax(-1), draft_logits.float().log_softmax(-1)
    mean = torch.logaddexp(target, draft) - math.log(2)
    return 0.5 * ((target.exp() * (target - mean)).sum(-1) + (draft.exp() * (draft - mean)).sum(-1))


def total_variation(target_logits: torch.Tensor, draft_logits: torch.Tensor) -> torch.Tensor:
    """Half the sum of absolute differences: one minus the acceptance rate of speculative sampling."""
    return 0.5 * (target_logits.float().softmax(-1) - draft_logits.float().softmax(-1)).abs().sum(-1)


DIVERGENCES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
}
"""Divergences by the name of the option."""


def distillation_loss(target: Any) -> LossFunction:
    """The loss of a draft taught by `target`, which stays as it is: mostly KL, a little cross-entropy of the text."""
    target.eval().requires_grad_(False)

    def loss(draft: Any, input_ids: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target_logits = logits_of(target, input_ids)
        draft_logits = logits_of(draft, input_ids)
        cross_entropy = F.cross_entropy(draft_logits.float().flatten(0, 1), target_ids.flatten())
        divergence = forward_divergence(target_logits, draft_logits)
        return (1 - CROSS_ENTROPY_WEIGHT) * divergence + CROSS_ENTROPY_WEIGHT * cross_entropy

    return loss
