"""HunYuan's mixture of experts."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.families.family import Family


def _hunyuan_gate(module: Any) -> None:
    """Replace HunYuan's router, which asks the weight of a linear layer for its type."""
    casts = module.wg.weight.dtype == torch.float32

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = module.wg(rows.float() if casts else rows)
        weights, expert_ids = torch.topk(torch.softmax(scores, dim=1, dtype=torch.float32), module.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return scores, weights.to(scores.dtype), expert_ids

    module.forward = forward


HUNYUAN = Family(model_types=("hunyuan_v1_moe",), bindings={"HunYuanMoEV1Gate": _hunyuan_gate})
