"""A model's experts by the row-independent product; the weights stay the checkpoint's own tensors."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.cuda.grouped_operators import fields_of
from betoken.engine.weights.experts import bias_of, find_experts, select_experts, up_name
from betoken.engine.weights.layers import ExpertWeights, in_orders

EXPERTS_NAME = "betoken_rows"
"""Value of `experts_implementation` that selects these experts."""


def use_row_experts(model: Any) -> bool:
    """Select our experts; False if the model has no supported ones."""
    if not find_experts(model):
        return False
    select_experts(model, EXPERTS_NAME, _row_product)
    return True


def first_experts(model: Any) -> Iterator[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]]:
    """The format and shape [N, K] of the first expert of every module, up and down, and its product by itself."""
    for module in find_experts(model):
        for name in (up_name(module), "down_proj"):
            weight = getattr(module, name)
            form: str = "dense"
            shape: tuple[int, ...]
            if isinstance(weight, ExpertWeights):
                form, shape = weight.grouped.kind, (weight.num_outputs, weight.grouped.num_inputs)
            else:
                shape = tuple(_dense(module, weight).shape[1:])
            yield form, shape, partial(_one_expert, module, name)


def _one_expert(module: Any, name: str, rows: Tensor) -> Tensor:
    return _product(module, name, rows, torch.zeros(len(rows), dtype=torch.int64, device=rows.device))


def _row_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """See `betoken.engine.weights.experts.ExpertProduct`."""
    return _product(module, name, rows, expert_ids)


def _product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    weight, bias, rows, expert_ids = (
        getattr(module, name),
        bias_of(module, name),
        rows.contiguous(),
        expert_ids.contiguous(),
    )
    gather: Any = getattr(module, f"gather_{name}", None)
    whole = 0 if gather is None else gather.keywords["columns"].total  # a rank has some columns of it
    out: Tensor
    if isinstance(weight, ExpertWeights):
        fields, rows = fields_of(weight.grouped), in_orders(rows, weight.orders, expert_ids)
        out = torch.ops.betoken_rows.expert_linear_grouped(rows, bias, whole, expert_ids, weight.num_experts, *fields)
    else:
        out = torch.ops.betoken_rows.expert_linear(rows, _dense(module, weight), bias, expert_ids, whole)
    return out


def _dense(module: Any, weight: Tensor) -> Tensor:
    return weight.transpose(1, 2) if module.is_transposed else weight
