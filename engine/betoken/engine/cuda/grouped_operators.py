"""Products by weights of few bits as torch operators: opaque to tracers, the same bits for a row in any company.

`torch.ops.betoken_rows.{linear_grouped,linear_grouped_sums,expert_linear_grouped}`. An operator takes numbers and
tensors, so a weight comes as its fields.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from betoken.engine.cuda.operators import NAMESPACE
from betoken.engine.custom_operator import define_operator
from betoken.kernels.expert_linear_grouped import expert_linear_grouped
from betoken.kernels.linear_grouped import Grouped, linear_grouped

_WEIGHT = (
    "Tensor values, Tensor scales, Tensor? high, Tensor? scale_units, Tensor? zeros, Tensor? offsets,"
    " Tensor? offset_units, Tensor? order, str kind, int num_inputs, int group, int zero"
)


def fields_of(weight: Grouped) -> tuple[Any, ...]:
    """The operators' arguments for a weight."""
    tensors = (weight.values, weight.scales, weight.high, weight.scale_units, weight.zeros, weight.offsets)
    return (*tensors, weight.offset_units, weight.order, weight.kind, weight.num_inputs, weight.group, weight.zero)


def weight_of(fields: tuple[Any, ...]) -> Grouped:
    """The weight again."""
    values, scales, high, scale_units, zeros, offsets, offset_units, order, kind, num_inputs, group, zero = fields
    return Grouped(
        kind=kind,
        num_inputs=num_inputs,
        group=group,
        values=values,
        scales=scales,
        high=high,
        scale_units=scale_units,
        zero=zero,
        zeros=zeros,
        offsets=offsets,
        offset_units=offset_units,
        order=order,
    )


def grouped_rows(
    x: Tensor, weight: Grouped, bias: Tensor | None, keeps_sums: bool = False, whole_outputs: int = 0
) -> Tensor:
    """The operator `linear_grouped`, or `linear_grouped_sums`, over the last dimension.

    x [..., K], weight [N, K], bias [N] -> [..., N]. `whole_outputs`: see `betoken.kernels.linear_grouped`.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    operators: Any = torch.ops.betoken_rows
    operator = operators.linear_grouped_sums if keeps_sums else operators.linear_grouped
    out: Tensor = operator(rows, bias, whole_outputs, *fields_of(weight))
    return out.reshape(*x.shape[:-1], -1)


def _linear(x: Tensor, bias: Tensor | None, whole_outputs: int, *fields: Any) -> Tensor:
    return linear_grouped(x, weight_of(fields), bias, whole_outputs=whole_outputs)


def _linear_sums(x: Tensor, bias: Tensor | None, whole_outputs: int, *fields: Any) -> Tensor:
    return linear_grouped(x, weight_of(fields), bias, keeps_sums=True, whole_outputs=whole_outputs)


def _experts(x: Tensor, bias: Tensor | None, whole_outputs: int, expert_ids: Tensor, num: int, *fields: Any) -> Tensor:
    return expert_linear_grouped(x, weight_of(fields), bias, expert_ids, num, whole_outputs)


def _linear_shape(x: Tensor, bias: Tensor | None, whole_outputs: int, *fields: Any) -> Tensor:
    return x.new_empty(x.shape[0], fields[0].shape[0])


def _sums_shape(x: Tensor, bias: Tensor | None, whole_outputs: int, *fields: Any) -> Tensor:
    return x.new_empty(x.shape[0], fields[0].shape[0], dtype=torch.float32)


def _experts_shape(
    x: Tensor, bias: Tensor | None, whole_outputs: int, expert_ids: Tensor, num: int, *fields: Any
) -> Tensor:
    return x.new_empty(x.shape[0], fields[0].shape[0] // num)


def _define(name: str, others: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    schema = f"(Tensor x, Tensor? bias, int whole_outputs, {others}{_WEIGHT}) -> Tensor"
    define_operator(f"{NAMESPACE}::{name}", schema, run, shape)


_define("linear_grouped", "", _linear, _linear_shape)
_define("linear_grouped_sums", "", _linear_sums, _sums_shape)
_define("expert_linear_grouped", "Tensor expert_ids, int num, ", _experts, _experts_shape)
