"""A linear layer of a model by the row-independent product; the weight stays the checkpoint's own tensor."""

import torch
from torch import Tensor, nn


class RowLinear(nn.Module):
    """y = x W^T + b; a row's bits depend on that row only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out: Tensor = torch.ops.foretoken_rows.linear(rows, self.weight, self.bias)
        return out.reshape(*x.shape[:-1], -1)
