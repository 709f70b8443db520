"""Torch reference of the product by a weight of few bits; see the package for the contract."""

import torch
from torch import Tensor

from betoken.kernels.linear import reference
from betoken.kernels.linear_grouped.weight import Grouped


def linear_grouped(
    x: Tensor, weight: Grouped, bias: Tensor | None, dtype: torch.dtype, whole_outputs: int = 0
) -> Tensor:
    """The rules of `betoken.kernels.linear_grouped.linear_grouped`, any device: a few outputs at a time."""
    rows = x.float()
    sums = torch.cat([reference.linear(rows, part.dequantised(), None) for part in weight.slices()], dim=1)
    return (sums if bias is None else sums + bias.float()).to(dtype)
