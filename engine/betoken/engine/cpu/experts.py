"""Mixtures of experts with custom kernels, and other products outside linear layers with the CPU kernels: row by row.

transformers lets an experts implementation be registered; routers call `functional.linear` on a bare parameter, which
a function mode redirects. It does not know which model it serves.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.integrations.moe import ExpertsInterface

from betoken.engine.weights.layers import ExpertWeights, in_orders
from betoken.kernels.cpu import CpuKernels
from betoken.kernels.cpu.grouped import pack_experts
from betoken.kernels.expert_linear import expert_linear
from betoken.kernels.expert_linear_grouped import expert_linear_grouped

EXPERTS_NAME = "betoken"
"""Value of `experts_implementation` that selects packed experts."""
GROUPED_EXPERTS_NAME = "betoken_grouped"
"""Experts computed by the references."""

_CASTS = (Tensor.float, Tensor.to, Tensor.type)


ExpertProduct = Callable[[Any, str, Tensor, Tensor], Tensor]
"""A module of experts, the name of its weight, rows [S, K], expert ids [S] -> [S, N], bias added."""


def use_packed_experts(model: Any, kernels: CpuKernels) -> bool:
    """Pack every module of expert weights and select our experts; False if the model has no supported ones."""
    modules = find_experts(model)
    if any(isinstance(module, ExpertWeights) for module in model.modules()):
        kernels.load_grouped()
    for module in modules:
        _pack(module)
    if modules:
        select_experts(model, EXPERTS_NAME, _packed_product)
    return bool(modules)


def find_experts(model: nn.Module) -> list[Any]:
    """The modules of expert weights that a registered implementation runs."""
    return [module for module in model.modules() if is_experts(module)]


def select_experts(model: Any, name: str, product: ExpertProduct) -> None:
    """Have the model's experts run in our order with this product; `name` is of the whole process."""

    def forward(module: Any, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        return _run_experts(product, module, hidden, expert_ids, expert_weights)

    register = cast(Callable[[str, Callable[..., Tensor]], None], ExpertsInterface.register)
    register(name, forward)
    model.set_experts_implementation(name)


def up_name(module: Any) -> str:
    """The name of the weight that a row meets first."""
    return "gate_up_proj" if getattr(module, "has_gate", False) else "up_proj"


def bias_of(module: Any, name: str) -> Tensor | None:
    """[E, N], the bias of the weight of that name."""
    bias: Tensor | None = getattr(module, f"{name}_bias") if module.has_bias else None
    return bias


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds weights of experts that a registered implementation may run."""
    weights = [getattr(module, name, None) for name in (up_name(module), "down_proj")]
    return hasattr(module, "has_bias") and all(
        isinstance(w, ExpertWeights) or (isinstance(w, Tensor) and w.dim() == 3) for w in weights
    )


def _pack(module: Any) -> None:
    """Replace [E, N, K] (or transposed) weights by packed ones [E, size of one]."""
    for name in (up_name(module), "down_proj"):
        weight = getattr(module, name)
        if isinstance(weight, ExpertWeights):
            delattr(module, name)
            packed_weight = pack_experts(weight.grouped, weight.num_experts)
            module.register_buffer(f"packed_{name}", packed_weight.data, persistent=False)
            setattr(module, f"num_{name}", packed_weight.num_outputs)
            setattr(module, f"format_{name}", packed_weight.code)
            module.register_buffer(f"orders_{name}", weight.orders, persistent=False)
            continue
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        packed = torch.stack([torch.ops.betoken.pack_linear(expert) for expert in weight])
        delattr(module, name)
        module.register_buffer(f"packed_{name}", packed, persistent=False)
        setattr(module, f"num_{name}", weight.shape[1])


def _packed_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    rows = in_orders(rows, getattr(module, f"orders_{name}", None), expert_ids)
    arguments = (rows, getattr(module, f"packed_{name}"), bias_of(module, name), expert_ids)
    num_outputs, form = getattr(module, f"num_{name}"), getattr(module, f"format_{name}", None)
    out: Tensor
    if form is None:
        out = torch.ops.betoken.expert_linear(*arguments, num_outputs)
    else:
        out = torch.ops.betoken.expert_linear_grouped(*arguments, num_outputs, form)
    return out


def use_grouped_experts(model: Any) -> None:
    """Select experts that run by the references, whatever their weights are: a loaded model's own forward."""
    select_experts(model, GROUPED_EXPERTS_NAME, _grouped_product)


def _grouped_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    weight, bias, rows = getattr(module, name), bias_of(module, name), rows.contiguous()
    if isinstance(weight, ExpertWeights):
        rows = in_orders(rows, weight.orders, expert_ids)
        return expert_linear_grouped(rows, weight.grouped, bias, expert_ids.contiguous(), weight.num_experts)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    return expert_linear(rows, weight, bias, expert_ids.contiguous())


def _run_experts(
    product: ExpertProduct, module: Any, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """hidden [R, H], expert_ids and expert_weights [R, k] -> [R, H]; each token visits its k experts."""
    num_rows, num_choices = expert_ids.shape
    flat_ids = expert_ids.reshape(-1)
    rows = hidden.repeat_interleave(num_choices, dim=0)
    up = product(module, up_name(module), rows, flat_ids)
    active = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    down = product(module, "down_proj", active, flat_ids)
    if getattr(module, "has_post_expert_norm", False):  # not known to transformers 5.17
        down = module.post_expert_norm(down)
    weighted = (down * expert_weights.reshape(-1, 1)).view(num_rows, num_choices, -1)
    total = weighted[:, 0]
    for choice in range(1, num_choices):  # one order of addition for every row
        total = total + weighted[:, choice]
    return total.to(hidden.dtype)


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
