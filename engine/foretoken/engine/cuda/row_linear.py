"""A linear layer of a model by the row-independent product; the weight stays the checkpoint's own tensor."""

import torch
from torch import Tensor, nn

from foretoken.engine.cuda.operators import linear_rows

_COMPANIES = (1, 16, 17, 32, 33, 64, 65, 128, 129)
"""Numbers of rows on both sides of every border between the product's tiles."""


class RowLinear(nn.Module):
    """y = x W^T + b; a row's bits depend on that row only."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight."""
        return linear_rows(x, self.weight, self.bias)


@torch.inference_mode()
def find_row_dependence(model: nn.Module) -> str | None:
    """A sentence about the first kind of linear layer whose rows' bits depend on how many there are, or None.

    The kernel's order of summation is fixed; that a device's matrix unit keeps it for tiles of any width is its maker's
    habit, not their word. So one layer of each shape is tried.
    """
    layers = {tuple(layer.weight.shape): layer for layer in model.modules() if isinstance(layer, RowLinear)}
    for (num_outputs, num_inputs), layer in layers.items():
        generator = torch.Generator().manual_seed(num_inputs)
        rows = torch.randn(max(_COMPANIES), num_inputs, generator=generator)
        rows = rows.to(layer.weight.device, layer.weight.dtype)
        together = layer(rows)
        for num_rows in _COMPANIES:
            if not (
                torch.equal(layer(rows[:num_rows]), together[:num_rows])
                and torch.equal(layer(rows[-num_rows:]), together[-num_rows:])
            ):
                return f"a row of a linear layer [{num_outputs}, {num_inputs}] changes its bits among {num_rows} rows"
    return None
