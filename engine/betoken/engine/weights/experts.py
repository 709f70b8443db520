"""The experts of a mixture as a registered implementation of transformers: one order of addition for every row.

The product of rows and experts is an argument: each device has its own, and the references have one.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from betoken.engine.weights.layers import ExpertWeights, in_orders
from betoken.kernels.expert_linear import expert_linear
from betoken.kernels.expert_linear_grouped import expert_linear_grouped
from betoken.kernels.linear_grouped.int8_rows import rounded

_GROUPED_EXPERTS_NAME = "betoken_grouped"
"""Value of `experts_implementation` that selects experts computed by the references."""

ExpertProduct = Callable[[Any, str, Tensor, Tensor], Tensor]
"""A module of experts, the name of its weight, rows [S, K], expert ids [S] -> [S, N], bias added."""


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


def use_grouped_experts(model: Any) -> None:
    """Select experts that run by the references, whatever their weights are: a loaded model's own forward."""
    select_experts(model, _GROUPED_EXPERTS_NAME, _grouped_product)


def _grouped_product(module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    weight, bias, rows = getattr(module, name), bias_of(module, name), rows.contiguous()
    if isinstance(weight, ExpertWeights):
        dtype, rows = rows.dtype, in_orders(rows, weight.orders, expert_ids)
        if weight.rounds_rows:
            rows, bias = rounded(rows), None if bias is None else bias.float()
        out = expert_linear_grouped(rows, weight.grouped, bias, expert_ids.contiguous(), weight.num_experts)
        return out.to(dtype)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    return expert_linear(rows, weight, bias, expert_ids.contiguous())


def _whole_product(product: ExpertProduct, module: Any, name: str, rows: Tensor, expert_ids: Tensor) -> Tensor:
    """The product, gathered from all ranks if each has some columns of the weight."""
    out = product(module, name, rows, expert_ids)
    gather: Callable[[Tensor], Tensor] | None = getattr(module, f"gather_{name}", None)
    return out if gather is None else gather(out)


def _run_experts(
    product: ExpertProduct, module: Any, hidden: Tensor, expert_ids: Tensor, expert_weights: Tensor
) -> Tensor:
    """hidden [R, H], expert_ids and expert_weights [R, k] -> [R, H]; each token visits its k experts."""
    num_rows, num_choices = expert_ids.shape
    flat_ids = expert_ids.reshape(-1)
    rows = hidden.repeat_interleave(num_choices, dim=0)
    up = _whole_product(product, module, up_name(module), rows, flat_ids)
    active = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    down = _whole_product(product, module, "down_proj", active, flat_ids)
    if getattr(module, "has_post_expert_norm", False):  # not known to transformers 5.17
        down = module.post_expert_norm(down)
    weighted = (down * expert_weights.reshape(-1, 1)).view(num_rows, num_choices, -1)
    total = weighted[:, 0]
    for choice in range(1, num_choices):  # one order of addition for every row
        total = total + weighted[:, choice]
    return total.to(hidden.dtype)
