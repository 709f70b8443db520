"""Linear layers whose rows do not depend on each other. A stock float32 product changes a row's last bits with the
number of rows: here every output is one sum in one order (packed), or every product has one shape (block).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

_BLOCK_ROWS = 16


class PackedLinear(nn.Module):
    """y = x W^T + b by the CPU kernel; the weight exists in the kernel's layout only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_outputs = weight.shape[0]
        self.packed: Tensor
        self.register_buffer("packed", torch.ops.betoken.pack_linear(weight), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight."""
        out: Tensor = torch.ops.betoken.linear(x, self.packed, self.bias, self.num_outputs)
        return out


class BlockLinear(nn.Module):
    """y = x W^T + b over blocks of exactly 16 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight."""
        rows = x.reshape(-1, x.shape[-1])
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK_ROWS))
        blocks = [functional.linear(block, self.weight, self.bias) for block in torch.split(padded, _BLOCK_ROWS)]
        return torch.cat(blocks)[: len(rows)].reshape(*x.shape[:-1], -1)


def replace_linears(model: nn.Module, make: Callable[[Tensor, Tensor | None], nn.Module]) -> None:
    """Put `make(weight [N, K], bias)` in the place of every linear layer of a model, and let go of each in turn."""
    for parent in [module for module in model.modules() if type(module) not in (nn.Linear, Conv1D)]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias))
            elif type(child) is Conv1D:
                setattr(parent, name, make(child.weight.T, child.bias))
