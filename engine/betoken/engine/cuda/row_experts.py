"""A model's experts by the row-independent product; the weights stay the checkpoint's own tensors."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.cpu.experts import bias_of, find_experts, select_experts, up_name

EXPERTS_NAME = "betoken_rows"
"""Value of `experts_implementation` that selects these experts."""


def use_row_experts(model: Any) -> bool:
    """Select our experts; False where the model has none we can take."""
    if not find_experts(model):
        return False
    select_experts(model, EXPERTS_NAME, _row_product)
    return True


def first_experts(model: Any) -> Iterator[tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """The weight [N, K] of the first expert of every module, up and down, and its product by itself."""
    for module in find_experts(model):
        for name in (up_name(module), "down_proj"):
            weight, bias = _weight(module, name)[:1], bias_of(module, name)
            yield weight[0], partial(_one_expert, weight, None if bias is None else bias[:1])


def _one_expert(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    expert_ids = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    out: Tensor = torch.ops.betoken_rows.expert_linear(rows, weight, bias, expert_ids)
    return out


def _row_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """See `betoken.engine.cpu.experts.ExpertProduct`."""
    out: Tensor = torch.ops.betoken_rows.expert_linear(
        rows.contiguous(), _weight(module, name), bias_of(module, name), expert_ids.contiguous()
    )
    return out


def _weight(module: Any, name: str) -> Tensor:
    weight: Tensor = getattr(module, name)
    return weight.transpose(1, 2) if module.is_transposed else weight
