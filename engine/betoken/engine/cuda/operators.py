"""The operators of a forward on a GPU, as torch operators: opaque to tracers, the same bits for a row in any company.

`torch.ops.betoken_rows.{linear,linear_sums,expert_linear,row_sum,attend,short_conv,state_conv,recur}`. They run on any
device for which the kernels have a path.
"""

from collections.abc import Callable
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.custom_operator import define_operator
from betoken.engine.paged_context import PagedContext
from betoken.kernels.expert_linear import expert_linear
from betoken.kernels.linear import linear
from betoken.kernels.linear_recurrence.rule import Recurrence
from betoken.kernels.row_sum import row_sum

NAMESPACE = "betoken_rows"

_numbers = count()
_contexts: "WeakValueDictionary[int, BatchContext]" = WeakValueDictionary()


class BatchContext:
    """Attention context that holds the pool and rows of the step being run or recorded."""

    def __init__(self) -> None:
        self.paged: PagedContext | None = None
        """Set before every call of the model."""
        self._number = next(_numbers)  # an operator takes numbers and tensors, not objects
        _contexts[self._number] = self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `AttentionContext.attend`."""
        out: Tensor = torch.ops.betoken_rows.attend(query, key, value, self._number, layer, *scoring)
        return out

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `AttentionContext.convolve`."""
        out: Tensor = torch.ops.betoken_rows.short_conv(x, weight, bias, self._number, layer)
        return out

    def convolve_states(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `AttentionContext.convolve_states`."""
        out: Tensor = torch.ops.betoken_rows.state_conv(x, weight, bias, self._number, layer)
        return out

    def recur(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        rule: Recurrence,
        rates: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionContext.recur`."""
        out: Tensor = torch.ops.betoken_rows.recur(query, key, value, gates, self._number, layer, rates, *rule)
        return out


def linear_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, keeps_sums: bool = False, whole_outputs: int = 0
) -> Tensor:
    """The operator `linear`, or `linear_sums`, over the last dimension.

    x [..., K], weight [N, K], bias [N] -> [..., N]. `whole_outputs`: see `betoken.kernels.linear`.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    operator: Any = torch.ops.betoken_rows.linear_sums if keeps_sums else torch.ops.betoken_rows.linear
    out: Tensor = operator(rows, weight, bias, whole_outputs)
    return out.reshape(*x.shape[:-1], -1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: int,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    span: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    return _paged(context).attend(layer, query, key, value, Scoring(scale, window, softcap, sinks, span, slopes))


def _paged(context: int) -> PagedContext:
    paged = _contexts[context].paged
    assert paged is not None, "the context's rows are set before the model is called"
    return paged


def _attend_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: int,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    span: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


def _short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, context: int, layer: int) -> Tensor:
    return _paged(context).convolve(layer, x, weight, bias)


def _short_conv_shape(x: Tensor, weight: Tensor, bias: Tensor | None, context: int, layer: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _state_conv(x: Tensor, weight: Tensor, bias: Tensor | None, context: int, layer: int) -> Tensor:
    return _paged(context).convolve_states(layer, x, weight, bias)


def _recur(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    context: int,
    layer: int,
    rates: Tensor | None,
    scale: float,
    is_delta: bool,
    normalizes: bool,
    weighs: bool,
) -> Tensor:
    rule = Recurrence(scale, is_delta, normalizes, weighs)
    return _paged(context).recur(layer, query, key, value, gates, rule, rates)


def _recur_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    context: int,
    layer: int,
    rates: Tensor | None,
    scale: float,
    is_delta: bool,
    normalizes: bool,
    weighs: bool,
) -> Tensor:
    return value.new_empty(value.shape, dtype=torch.float32)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, whole_outputs: int = 0) -> Tensor:
    return linear(x, weight, bias, whole_outputs=whole_outputs)


def _linear_shape(x: Tensor, weight: Tensor, bias: Tensor | None, whole_outputs: int = 0) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_sums(x: Tensor, weight: Tensor, bias: Tensor | None, whole_outputs: int = 0) -> Tensor:
    return linear(x, weight, bias, True, whole_outputs)


def _linear_sums_shape(x: Tensor, weight: Tensor, bias: Tensor | None, whole_outputs: int = 0) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _expert_linear_shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, whole_outputs: int = 0
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _row_sum_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


def _define(name: str, schema: str, run: Callable[..., Tensor], shape: Callable[..., Tensor]) -> None:
    define_operator(f"{NAMESPACE}::{name}", schema, run, shape)


_LINEAR = "(Tensor x, Tensor weight, Tensor? bias, int whole_outputs=0) -> Tensor"
_define("linear", _LINEAR, _linear, _linear_shape)
_define("linear_sums", _LINEAR, _linear_sums, _linear_sums_shape)
_define(
    "expert_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids, int whole_outputs=0) -> Tensor",
    expert_linear,
    _expert_linear_shape,
)
_define("materialize", "(Tensor x) -> Tensor", torch.clone, torch.empty_like)
_define("row_sum", "(Tensor x) -> Tensor", row_sum, _row_sum_shape)
_define(
    "attend",
    "(Tensor query, Tensor key, Tensor value, int context, int layer, float scale, int window, float softcap,"
    " Tensor? sinks, int span, Tensor? slopes) -> Tensor",
    _attend,
    _attend_shape,
)
_define(
    "short_conv",
    "(Tensor x, Tensor weight, Tensor? bias, int context, int layer) -> Tensor",
    _short_conv,
    _short_conv_shape,
)
_define(
    "state_conv",
    "(Tensor x, Tensor weight, Tensor? bias, int context, int layer) -> Tensor",
    _state_conv,
    _short_conv_shape,
)
_define(
    "recur",
    "(Tensor query, Tensor key, Tensor value, Tensor gates, int context, int layer, Tensor? rates, float scale,"
    " bool is_delta, bool normalizes, bool weighs) -> Tensor",
    _recur,
    _recur_shape,
)
