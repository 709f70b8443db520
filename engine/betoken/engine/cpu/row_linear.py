"""Linear layers by the CPU kernel: every output is one sum in one order, whatever the number of rows.

The layer that gives logits keeps its float32 sums: rounded to a half type, many a position has two best logits.
"""

from typing import Any

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """y = x W^T + b by the CPU kernel; the weight exists in the kernel's layout only."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keeps_sums: bool = False) -> None:
        super().__init__()
        self.num_outputs = weight.shape[0]
        self._operator: Any = torch.ops.betoken.linear_sums if keeps_sums else torch.ops.betoken.linear
        self.packed: Tensor
        self.register_buffer("packed", torch.ops.betoken.pack_linear(weight), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight or float32."""
        out: Tensor = self._operator(x, self.packed, self.bias, self.num_outputs)
        return out
