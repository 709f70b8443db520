"""Mixtures of experts, and other products outside linear layers, with the CPU kernels: row by row.

Routers call `functional.linear` on a bare parameter, which a function mode redirects.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from betoken.engine.weights.experts import bias_of, find_experts, select_experts, up_name
from betoken.engine.weights.layers import ExpertWeights, in_orders
from betoken.kernels.cpu import CpuKernels
from betoken.kernels.cpu.grouped import pack_experts

EXPERTS_NAME = "betoken"
"""Value of `experts_implementation` that selects packed experts."""
_CASTS = (Tensor.float, Tensor.to, Tensor.type)


def use_packed_experts(model: Any, kernels: CpuKernels) -> bool:
    """Pack every module of expert weights and select our experts; False if the model has no supported ones."""
    modules = find_experts(model)
    if any(isinstance(module, ExpertWeights) for module in model.modules()):
        kernels.load_grouped()
    for module in modules:
        _pack(module)
    if modules:
        select_experts(model, EXPERTS_NAME, packed_product)
    return bool(modules)


def _pack(module: Any) -> None:
    """Replace [E, N, K] (or transposed) weights by packed ones [E, size of one]."""
    for name in (up_name(module), "down_proj"):
        weight = getattr(module, name)
        if isinstance(weight, ExpertWeights):
            delattr(module, name)
            packed_weight = pack_experts(weight.grouped, weight.num_experts)
            module.register_buffer(f"packed_{name}", packed_weight.data, persistent=False)
            setattr(module, f"num_{name}", packed_weight.num_outputs)
            setattr(module, f"num_inputs_{name}", packed_weight.num_inputs)
            setattr(module, f"format_{name}", packed_weight.code)
            module.rounds_rows = weight.rounds_rows
            module.register_buffer(f"orders_{name}", weight.orders, persistent=False)
            continue
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        packed = torch.stack([torch.ops.betoken.pack_linear(expert) for expert in weight])
        delattr(module, name)
        module.register_buffer(f"packed_{name}", packed, persistent=False)
        setattr(module, f"num_{name}", weight.shape[1])


def packed_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """Rows times the weights `name` of their experts, [R, K] -> [R, N]."""
    rows = in_orders(rows, getattr(module, f"orders_{name}", None), expert_ids)
    arguments = (rows, getattr(module, f"packed_{name}"), bias_of(module, name), expert_ids)
    num_outputs, form = getattr(module, f"num_{name}"), getattr(module, f"format_{name}", None)
    out: Tensor
    if form is None:
        out = torch.ops.betoken.expert_linear(*arguments, num_outputs)
    elif module.rounds_rows:
        out = torch.ops.betoken.expert_linear_int8(*arguments, num_outputs, form)
    else:
        out = torch.ops.betoken.expert_linear_grouped(*arguments, num_outputs, form)
    return out


class BareProducts(TorchFunctionMode):
    """Redirects `functional.linear` on parameters that no linear layer owns (routers) to the packed product.

    The router of a half type may multiply in float32: a parameter's cast is made once and is then one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters: dict[int, Tensor] = {id(weight): weight for weight in model.parameters() if weight.dim() == 2}
        self._packed: dict[int, Tensor] = {}
        self._casts: dict[tuple[Any, ...], Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and len(args) >= 2 and id(args[1]) in self._parameters:
            return self._linear(*args, **(kwargs or {}))
        if func in _CASTS and id(args[0]) in self._parameters and not kwargs:
            if all(isinstance(given, torch.dtype) for given in args[1:]):
                return self._cast(func, *args)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # Half types multiply in their own type; a router may cast its rows first.
        key = id(weight)
        if key not in self._packed:
            self._packed[key] = torch.ops.betoken.pack_linear(weight)
        out: Tensor = torch.ops.betoken.linear(x, self._packed[key], bias, weight.shape[0])
        return out

    def _cast(self, cast: Callable[..., Tensor], weight: Tensor, *dtype: torch.dtype) -> Tensor:
        key = (id(weight), cast, *dtype)
        if key not in self._casts:
            self._casts[key] = cast(weight, *dtype)
            self._parameters[id(self._casts[key])] = self._casts[key]
        return self._casts[key]

    @property
    def num_redirected(self) -> int:
        """Parameters met so far."""
        return len(self._packed)
