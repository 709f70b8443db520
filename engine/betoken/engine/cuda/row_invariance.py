"""Keeps a model's forward to row-invariant operators, whatever the model's code calls.

A GPU's stock products and reductions pick their order of summation by the number of rows. While this mode is on they
are replaced by ours; elementwise operators and views pass; any other is refused by name. It costs time on every call,
so forwards are recorded under it (graphs) rather than run.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from betoken.engine.cuda.operators import NAMESPACE, linear_rows
from betoken.engine.errors import ModelRefusedError
from betoken.engine.step import NAMESPACE as STEP_NAMESPACE

_ATEN = torch.ops.aten

# Operators that move or make elements, and those whose kernels treat each row by itself in an order set by its length.
_PASSING = frozenset(
    {
        _ATEN.arange,
        _ATEN.cat,
        _ATEN.clone,
        _ATEN.constant_pad_nd,
        _ATEN.copy_,
        _ATEN.embedding,
        _ATEN.empty,
        _ATEN.full,
        _ATEN.full_like,
        _ATEN.gather,
        _ATEN.index,
        _ATEN.index_select,
        _ATEN.lift_fresh,
        _ATEN.new_empty,
        _ATEN.new_zeros,
        _ATEN.ones,
        _ATEN.ones_like,
        _ATEN.repeat,
        _ATEN.stack,
        _ATEN._to_copy,
        _ATEN._unsafe_view,
        _ATEN.zeros,
        _ATEN.zeros_like,
    }
)

_PASSING_NAMESPACES = (NAMESPACE, STEP_NAMESPACE, "betoken_ranks", "betoken_stages", "prim")
"""Our operators on rows, exchanges between ranks, and questions about a tensor, which tracers ask."""


class RowInvariance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, every operator has independent rows.

    Raises:
        ModelRefusedError: from within the model's forward, naming the operator.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if (replacement := _REPLACEMENTS.get(func)) is not None:
            return replacement(*args, **keywords)
        if _is_independent(func):
            return func(*args, **keywords)
        with self:  # a composite operator may be made of operators that are known
            result = func.decompose(*args, **keywords)
        if result is NotImplemented:
            raise ModelRefusedError(f"the model uses {func}, whose rows may depend on each other on this device")
        return result


def _is_independent(func: Any) -> bool:
    return (
        torch.Tag.pointwise in func.tags
        or func.is_view
        or func.overloadpacket in _PASSING
        or func.namespace in _PASSING_NAMESPACES
    )


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear_rows(x, weight.contiguous(), bias)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    return _linear(left, right.t())


def _addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if bias.dim() != 1 or beta != 1 or alpha != 1:
        raise ModelRefusedError("the model uses aten.addmm other than as a linear layer")
    return _linear(left, right.t(), bias.contiguous())


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    if left.shape[2] != 1:
        raise ModelRefusedError("the model multiplies in batches, whose rows may depend on each other on this device")
    return left * right  # one term a sum: rotary angles


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not x.is_floating_point() or dim is None or [axis % x.dim() for axis in dim] != [x.dim() - 1]:
        raise ModelRefusedError("the model sums over rows, or other than floats")
    total: Tensor = torch.ops.betoken_rows.row_sum(x.reshape(-1, x.shape[-1]).contiguous())
    shape = (*x.shape[:-1], 1) if keepdim else x.shape[:-1]
    return total.reshape(shape).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return (_sum(x, dim, keepdim, dtype=torch.float32) / x.shape[-1]).to(dtype or x.dtype)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    _check_last(x, dim, "ranks")
    values, places = _ATEN.sort.stable(x, stable=True, dim=-1, descending=largest)  # of equals the first: no choice
    return values.narrow(-1, 0, k).contiguous(), places.narrow(-1, 0, k).contiguous()


def _scatter(x: Tensor, dim: int, places: Tensor, value: float) -> Tensor:
    _check_last(x, dim, "scatters")
    out: Tensor = _ATEN.scatter.value(x, dim, places, value)  # one value: who writes last changes nothing
    return out


def _scatter_(x: Tensor, dim: int, places: Tensor, value: float) -> Tensor:
    _check_last(x, dim, "scatters")
    out: Tensor = _ATEN.scatter_.value(x, dim, places, value)
    return out


def _check_last(x: Tensor, dim: int, verb: str) -> None:
    if dim % x.dim() != x.dim() - 1:
        raise ModelRefusedError(f"the model {verb} over rows")


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    _check_last(x, dim, "takes a softmax")
    wide = x.float()
    terms = (wide - wide.amax(-1, keepdim=True)).exp()
    out = terms / _sum(terms, [-1], keepdim=True)  # not a compiler's sum: its order is measured anew at each start
    return out if half_to_float else out.to(x.dtype)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check_normalized(shape)
    wide = x.float()
    mean = _mean(wide, [-1], keepdim=True)
    centred = wide - mean
    scale = (_mean(centred * centred, [-1], keepdim=True) + eps).rsqrt()
    return _scaled(centred * scale, weight, bias).to(x.dtype), mean, scale


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    _check_normalized(shape)
    wide = x.float()
    scale = (_mean(wide * wide, [-1], keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return _scaled(wide * scale, weight, None).to(x.dtype), scale


def _check_normalized(shape: Sequence[int]) -> None:
    if len(shape) != 1:
        raise ModelRefusedError("the model normalizes over more than the last dimension")


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight.float()
    return x if bias is None else x + bias.float()


_REPLACEMENTS: dict[Any, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    _ATEN.linear.default: _linear,
    _ATEN.mm.default: _mm,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.dim: _mean,
    _ATEN._softmax.default: _softmax,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN._fused_rms_norm.default: _rms_norm,
    _ATEN.topk.default: _topk,
    _ATEN.scatter.value: _scatter,
    _ATEN.scatter_.value: _scatter_,
}
