"""A linear layer of a model by the row-independent product; the weight stays the checkpoint's own tensor."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from betoken.engine.cuda.operators import linear_rows
from betoken.engine.cuda.row_experts import first_experts

_COMPANIES = (1, 16, 17, 32, 33, 64, 65, 128, 129)
"""Numbers of rows on both sides of every border between the product's tiles."""


class RowLinear(nn.Module):
    """y = x W^T + b; a row's bits depend on that row only."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keeps_sums: bool = False) -> None:
        super().__init__()
        self.keeps_sums = keeps_sums
        """Whether the result is float32, whatever the weight is."""
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight or float32."""
        return linear_rows(x, self.weight, self.bias, self.keeps_sums)


@torch.inference_mode()
def find_row_dependence(model: nn.Module) -> str | None:
    """A sentence about the first kind of layer whose bits depend on the number of rows, or None.

    The kernel's order of summation is fixed; that a device's matrix unit keeps it for tiles of any width is its maker's
    habit, not their word. One linear layer and one expert of each shape are tried.
    """
    for kind, weight, product in _products(model):
        generator = torch.Generator().manual_seed(weight.shape[1])
        rows = torch.randn(max(_COMPANIES), weight.shape[1], generator=generator)
        rows = rows.to(weight.device, weight.dtype)
        together = product(rows)
        for num_rows in _COMPANIES:
            if not (
                torch.equal(product(rows[:num_rows]), together[:num_rows])
                and torch.equal(product(rows[-num_rows:]), together[-num_rows:])
            ):
                return f"a row of {kind} {list(weight.shape)} changes its bits among {num_rows} rows"
    return None


def _products(model: nn.Module) -> Iterable[tuple[str, Tensor, Callable[[Tensor], Tensor]]]:
    """A kind of layer, its weight [N, K] and its product, once for each shape."""
    found: dict[tuple[str, torch.Size], tuple[str, Tensor, Callable[[Tensor], Tensor]]] = {}
    for layer in model.modules():
        if isinstance(layer, RowLinear):
            found["linear", layer.weight.shape] = ("a linear layer", layer.weight, layer)
    for weight, product in first_experts(model):
        found["expert", weight.shape] = ("an expert", weight, product)
    return found.values()
