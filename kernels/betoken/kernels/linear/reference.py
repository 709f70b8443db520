"""Torch reference of the row-independent linear layer; see the package for the contract."""

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK_ROWS = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, keeps_sums: bool = False, whole_outputs: int = 0) -> Tensor:
    """The rules of `betoken.kernels.linear.linear`, any device: every product has exactly 16 rows."""
    padded = functional.pad(x.float(), (0, 0, 0, -len(x) % _BLOCK_ROWS))
    weight32 = weight.float()
    bias32 = None if bias is None else bias.float()
    blocks = [functional.linear(block, weight32, bias32) for block in torch.split(padded, _BLOCK_ROWS)]
    return torch.cat(blocks)[: len(x)].to(torch.float32 if keeps_sums else x.dtype)
