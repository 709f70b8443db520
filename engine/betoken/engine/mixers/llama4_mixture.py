"""Llama 4's mixture of experts, each token through its own experts alone. It knows no positions or batches."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.moe import use_experts_implementation


@use_experts_implementation(is_transposed=True)
class _Experts(nn.Module):
    """Weights of experts in the layout that registered implementations run."""

    def __init__(self, config: Any, experts: Any) -> None:
        super().__init__()
        self.num_experts = experts.num_experts
        self.gate_up_proj, self.down_proj, self.act_fn = experts.gate_up_proj, experts.down_proj, experts.act_fn

    def forward(self, hidden_states: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        raise AssertionError("the implementation is chosen by name")


class Llama4Mixture(nn.Module):
    """A shared expert and the chosen ones. A token's weight scales what its expert reads."""

    def __init__(self, mixture: Any, config: Any) -> None:
        """`mixture`: a `Llama4TextMoe`; its layers move here."""
        super().__init__()
        router = mixture.router
        self.top_k = router.top_k
        self.router = nn.Linear(router.in_features, router.out_features, bias=False, device="meta")
        self.router.weight = router.weight
        self.shared_expert = mixture.shared_expert
        self.experts = _Experts(config, mixture.experts)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[1, R, H] -> [R, H], and the router's scores [R, E]."""
        rows = hidden_states.flatten(0, 1)
        scores = self.router(rows)
        best, expert_ids = torch.topk(scores, self.top_k, dim=-1)
        weights = functional.sigmoid(best.float()).to(rows.dtype)
        scaled = (rows[:, None] * weights[..., None]).flatten(0, 1)
        ids = expert_ids.flatten()[:, None]
        out = self.experts(scaled, ids, torch.ones_like(ids, dtype=rows.dtype)).unflatten(0, (-1, self.top_k))
        total = self.shared_expert(rows)
        for choice in range(self.top_k):  # one order of addition for every row
            total = total + out[:, choice]
        return total, scores
