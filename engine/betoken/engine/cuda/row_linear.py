"""A linear layer of a model by the row-independent product; the weight stays the checkpoint's own tensor."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.cuda.grouped_operators import grouped_rows
from betoken.engine.cuda.operators import linear_rows
from betoken.engine.cuda.row_experts import first_experts
from betoken.engine.ranks.layers import RankLinear
from betoken.engine.weights.layers import GroupedLinear

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
        self.whole_outputs = len(weight)
        """Outputs of the whole layer, by which sums are ordered; a rank has a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight or float32."""
        return linear_rows(x, self.weight, self.bias, self.keeps_sums, self.whole_outputs)


class RowGroupedLinear(GroupedLinear):
    """Linear layer with a low-bit weight, which stays quantised."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__(layer.grouped, layer.bias)
        self.keeps_sums = layer.keeps_sums
        self.whole_outputs = layer.grouped.shape[0]
        """See `RowLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of x or float32."""
        return grouped_rows(x, self.grouped, self.bias, self.keeps_sums, self.whole_outputs)


def replace_grouped(model: nn.Module) -> None:
    """Put our layers in the place of all grouped linear ones."""
    for path, layer in list(model.named_modules()):
        if type(layer) is GroupedLinear:
            model.set_submodule(path, RowGroupedLinear(layer))


def order_as_whole(model: nn.Module) -> None:
    """Let the parts of layers that a rank has add up in the order of the whole layers."""
    for module in model.modules():
        if isinstance(module, RankLinear) and isinstance(module.own, (RowLinear, RowGroupedLinear)):
            module.own.whole_outputs = module.columns.total


@torch.inference_mode()
def find_row_dependence(model: nn.Module) -> str | None:
    """A sentence about the first kind of layer whose bits depend on the number of rows, or None.

    The kernel's order of summation is fixed; that a device's matrix unit keeps it for tiles of any width is its maker's
    habit, not their word. One linear layer and one expert of each shape are tried.
    """
    like = next(model.parameters())
    for kind, shape, product in _products(model):
        generator = torch.Generator().manual_seed(shape[1])
        rows = torch.randn(max(_COMPANIES), shape[1], generator=generator)
        rows = rows.to(like.device, like.dtype)
        together = product(rows)
        for num_rows in _COMPANIES:
            if not (
                torch.equal(product(rows[:num_rows]), together[:num_rows])
                and torch.equal(product(rows[-num_rows:]), together[-num_rows:])
            ):
                return f"a row of {kind} {list(shape)} changes its bits among {num_rows} rows"
    return None


def _products(model: nn.Module) -> Iterable[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]]:
    """A kind of layer, its shape [N, K] and its product, once for each shape and format."""
    found: dict[tuple[Any, ...], tuple[str, tuple[int, ...], Callable[[Tensor], Tensor]]] = {}
    for layer in model.modules():
        if isinstance(layer, RowLinear):
            shape = tuple(layer.weight.shape)
            found["linear", shape] = ("a linear layer", shape, layer)
        elif isinstance(layer, RowGroupedLinear):
            weight = layer.grouped
            found[weight.kind, weight.group, weight.shape] = (f"a layer of {weight.kind}", weight.shape, layer)
    for form, shape, product in first_experts(model):
        found["expert", form, shape] = ("an expert", shape, product)
    return found.values()
