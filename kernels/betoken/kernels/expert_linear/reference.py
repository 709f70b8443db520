"""Torch reference of the experts' linear layers; see the package for the contract."""

from torch import Tensor

from betoken.kernels.linear import reference


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, whole_outputs: int = 0) -> Tensor:
    """The rules of `betoken.kernels.expert_linear.expert_linear`, any device: one linear layer after the other."""
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert in set(expert_ids.tolist()):
        slots = (expert_ids == expert).nonzero()[:, 0]
        out[slots] = reference.linear(x[slots], weight[expert], None if bias is None else bias[expert])
    return out
