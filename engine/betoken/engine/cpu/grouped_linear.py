"""Grouped layers by the CPU kernel for weights of few bits, which exist in the kernel's layout only."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.weights.layers import GROUPED_LAYERS, GroupedEmbedding, GroupedLinear, key_of
from betoken.engine.weights.memory import give_back
from betoken.kernels.cpu import CpuKernels
from betoken.kernels.cpu.grouped import PackedGrouped, PackedWeight
from betoken.kernels.linear_grouped import Grouped


class PackedGroupedLinear(nn.Module):
    """y = x W^T + b; the layer that gives logits keeps its float32 sums."""

    def __init__(self, weight: PackedWeight, layer: GroupedLinear) -> None:
        super().__init__()
        self.source = layer.grouped.described()
        """Format of the weight, without its numbers."""
        bias, order = layer.bias, layer.grouped.order
        self.order: Tensor | None
        self.register_buffer("order", order, persistent=False)
        self.num_outputs, self.format = weight.num_outputs, weight.code
        suffix = "_sums" if layer.keeps_sums else ""
        self._exact: Any = getattr(torch.ops.betoken, f"linear_grouped{suffix}")
        self._rounding: Any = getattr(torch.ops.betoken, f"linear_int8{suffix}") if layer.rounds_rows else None
        self.num_inputs, self.rounds_rows = weight.num_inputs, layer.rounds_rows
        self.packed: Tensor
        self.register_buffer("packed", weight.data, persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of x or float32."""
        if self.order is not None:
            x = x.index_select(-1, self.order)
        product = self._rounding if self.rounds_rows else self._exact
        out: Tensor = product(x, self.packed, self.bias, self.num_outputs, self.format)
        return out


class PackedGroupedEmbedding(nn.Module):
    """Rows of a table in the kernel's layout, which an output layer may share, times a number."""

    def __init__(self, weight: PackedWeight, layer: GroupedEmbedding) -> None:
        super().__init__()
        self.source = layer.grouped.described()
        """Format of the weight, without its numbers."""
        self.scale = layer.scale
        self.shape, self.format, self.dtype = (weight.num_outputs, weight.num_inputs), weight.code, layer.dtype
        self.packed: Tensor
        self.register_buffer("packed", weight.data, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]."""
        rows: Tensor = torch.ops.betoken.grouped_rows(ids, self.packed, *self.shape, self.format)
        rows = rows.to(self.dtype)
        return rows if self.scale == 1 else rows * self.scale


def pack_grouped_layers(
    model: nn.Module, kernels: CpuKernels, progress: Callable[[float], None] = lambda fraction: None
) -> None:
    """Replace all grouped layers by the CPU kernels', freeing each in turn; tied ones stay tied.

    Args:
        progress: called with the fraction of layers packed so far.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, GROUPED_LAYERS)}
    if layers:
        kernels.load_grouped()
    num_users = Counter(key_of(layer.grouped) for layer in layers.values())
    packed: dict[int, PackedWeight] = {}
    num_layers = len(layers)
    while layers:
        progress(1 - len(layers) / num_layers)
        path, layer = layers.popitem()
        key = key_of(layer.grouped)
        weight = packed[key] if key in packed else _packed(layer.grouped)
        if num_users[key] > 1:
            packed[key] = weight
        if isinstance(layer, GroupedLinear):
            model.set_submodule(path, PackedGroupedLinear(weight, layer))
        else:
            model.set_submodule(path, PackedGroupedEmbedding(weight, layer))
        del layer, weight
        give_back()


def _packed(weight: Grouped) -> PackedWeight:
    """Pack a weight unless an earlier start has."""
    if isinstance(weight, PackedGrouped) and weight.packed is not None:
        return weight.packed
    return PackedWeight.of(weight)
