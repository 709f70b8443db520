"""Layers whose weights keep their checkpoint's few bits, as they are after loading.

They run by the torch reference; a forward puts its own kernels' layers in their place. They know no formats.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from betoken.kernels.linear_grouped import Grouped, linear_grouped


class _GroupedLayer(nn.Module):
    """Keeps a grouped weight, which moves with the model and is never cast."""

    def __init__(self, weight: Grouped) -> None:
        super().__init__()
        self.grouped = weight

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # Stored as bytes: `fn` may ask for another dtype, which a format's numbers do not have.
        tensors: dict[str, Any] = self.grouped.tensors()
        moved = {
            # Flat, since a single column may have any stride.
            name: fn(tensor.view(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)
            for name, tensor in tensors.items()
        }
        self.grouped = replace(self.grouped, **moved)
        return cast(Any, super())._apply(fn, recurse)


class GroupedLinear(_GroupedLayer):
    """y = x W^T + b by the reference."""

    def __init__(self, weight: Grouped, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.keeps_sums = False
        """Whether the result is the float32 sums, as logits are."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of x or float32."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        rows = linear_grouped(rows, self.grouped, self.bias, keeps_sums=self.keeps_sums)
        return rows.reshape(*x.shape[:-1], -1)


class GroupedEmbedding(_GroupedLayer):
    """Rows of a table."""

    def __init__(self, weight: Grouped, dtype: torch.dtype) -> None:
        super().__init__(weight)
        self.dtype = dtype
        """What the model computes in."""

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]."""
        return self.grouped.rows(ids.reshape(-1)).dequantised().to(self.dtype).reshape(*ids.shape, -1)


class ExpertWeights(_GroupedLayer):
    """The weights of a module's experts, [E * N, K], in the place of its parameter; the module's product reads them."""

    def __init__(self, weight: Grouped, num_experts: int) -> None:
        super().__init__(weight)
        self.num_experts = num_experts

    @property
    def num_outputs(self) -> int:
        """N, of one expert."""
        return self.grouped.shape[0] // self.num_experts


GROUPED_LAYERS = (GroupedLinear, GroupedEmbedding)


def grouped_bytes(model: nn.Module) -> int:
    """Bytes of the grouped weights of a model, each counted once."""
    tensors = {
        tensor.data_ptr(): tensor.nbytes
        for module in model.modules()
        if isinstance(module, _GroupedLayer)
        for tensor in module.grouped.tensors().values()
    }
    return sum(tensors.values())


def num_grouped(model: nn.Module) -> int:
    """Weights that the grouped layers of a model stand for, each counted once."""
    layers = [module.grouped for module in model.modules() if isinstance(module, _GroupedLayer)]
    counts = {weight.values.data_ptr(): weight.shape[0] * weight.shape[1] for weight in layers}
    return sum(counts.values())


def output_width(layer: Any) -> int:
    """Outputs of a dense or grouped linear layer."""
    width: int = layer.grouped.shape[0] if isinstance(layer, GroupedLinear) else layer.weight.shape[0]
    return width
