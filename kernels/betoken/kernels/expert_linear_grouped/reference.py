"""Torch reference of the experts' products by weights of few bits; see the package for the contract."""

from torch import Tensor

from betoken.kernels.linear_grouped import Grouped, reference


def expert_linear_grouped(
    x: Tensor, weight: Grouped, bias: Tensor | None, expert_ids: Tensor, num: int, whole_outputs: int = 0
) -> Tensor:
    """The rules of `betoken.kernels.expert_linear_grouped`, any device: one linear layer after the other."""
    num_outputs = weight.shape[0] // num
    out = x.new_empty(x.shape[0], num_outputs)
    for expert in set(expert_ids.tolist()):
        slots = (expert_ids == expert).nonzero()[:, 0]
        own = weight.rows(slice(expert * num_outputs, (expert + 1) * num_outputs))
        out[slots] = reference.linear_grouped(x[slots], own, None if bias is None else bias[expert], x.dtype)
    return out
