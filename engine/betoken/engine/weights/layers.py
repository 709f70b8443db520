"""Layers whose weights keep their checkpoint's few bits, as they are after loading.

They run by the torch reference; a forward puts its own kernels' layers in their place. They know no formats.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.parts import MakeLinear
from betoken.kernels.linear_grouped import Grouped, linear_grouped
from betoken.kernels.linear_grouped.int8_rows import rounded
from betoken.kernels.linear_grouped.weight import in_order


class _GroupedLayer(nn.Module):
    """Keeps a grouped weight, which moves with the model and is never cast."""

    def __init__(self, weight: Grouped) -> None:
        super().__init__()
        self.grouped = weight
        self.rounds_rows = False
        """Whether the layer's product rounds its rows to int8."""
        self.yields_zeros = False
        """Whether the layer returns zeros, for a forward that only shows shapes."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.grouped.values.is_meta:
            return cast(Any, super())._apply(fn, recurse)
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
        if self.yields_zeros:
            dtype = torch.float32 if self.keeps_sums else x.dtype
            return x.new_zeros(*x.shape[:-1], self.grouped.shape[0], dtype=dtype)
        rows, weight = x.reshape(-1, x.shape[-1]).contiguous(), self.grouped
        bias: Tensor | None = self.bias
        if self.rounds_rows:
            rows, weight = in_order(rows, weight)
            rows, bias = rounded(rows), None if bias is None else bias.float()
        rows = linear_grouped(rows, weight, bias, keeps_sums=self.keeps_sums)
        return (rows if self.keeps_sums else rows.to(x.dtype)).reshape(*x.shape[:-1], -1)


class GroupedEmbedding(_GroupedLayer):
    """Rows of a table, times a number."""

    def __init__(self, weight: Grouped, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__(weight)
        self.dtype, self.scale = dtype, scale
        """Element type of the model, and the factor of its rows."""

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]."""
        if self.yields_zeros:
            return torch.zeros(*ids.shape, self.grouped.num_inputs, dtype=self.dtype, device=ids.device)
        rows = self.grouped.rows(ids.reshape(-1)).dequantised().to(self.dtype).reshape(*ids.shape, -1)
        return rows if self.scale == 1 else rows * self.scale


class ExpertWeights(_GroupedLayer):
    """The weights of a module's experts, [E * N, K], in the place of its parameter; the module's product reads them."""

    def __init__(self, weight: Grouped, num_experts: int, orders: Tensor | None = None) -> None:
        super().__init__(weight)
        self.num_experts = num_experts
        self.orders: Tensor | None
        """Which input each place of an expert's codes belongs to, [E, K] int32; None is their own order."""
        self.register_buffer("orders", orders, persistent=False)

    @property
    def num_outputs(self) -> int:
        """N, of one expert."""
        return self.grouped.shape[0] // self.num_experts

    def of_outputs(self, outputs: slice) -> "ExpertWeights":
        """The weights of these outputs of each expert, in separate memory."""
        firsts = torch.arange(self.num_experts, device=self.grouped.values.device)[:, None] * self.num_outputs
        rows = firsts + torch.arange(outputs.start, outputs.stop, device=firsts.device)
        found = ExpertWeights(self.grouped.rows(rows.flatten()), self.num_experts, self.orders)
        found.rounds_rows = self.rounds_rows
        return found


def in_orders(rows: Tensor, orders: Tensor | None, expert_ids: Tensor) -> Tensor:
    """Rows [S, K] with their inputs in the order of the codes of the expert that each names."""
    if orders is None:
        return rows
    return rows.gather(1, orders.index_select(0, expert_ids).long())


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer only multiplies by its weight or looks it up."""
    return type(layer).forward in (nn.Linear.forward, nn.Embedding.forward, Conv1D.forward)


def scale_of(layer: Any, dtype: torch.dtype) -> float | None:
    """Factor of a layer's rows, 1 for most; None if its code differs.

    Args:
        dtype: what the model computes in, to which transformers rounds a scale that is a buffer.
    """
    if is_plain(layer):
        return 1.0
    scale = getattr(layer, "embed_scale", None)
    if not isinstance(layer, nn.Embedding) or scale is None:
        return None
    if not isinstance(scale, Tensor):
        return float(scale)
    number = getattr(layer, "scalar_embed_scale", None)  # the buffer is not filled yet
    return None if number is None else float(torch.tensor(number, dtype=dtype, device="cpu"))


GROUPED_LAYERS = (GroupedLinear, GroupedEmbedding)


def key_of(weight: Grouped) -> int:
    """Identifies the memory of a weight, which tied layers share."""
    return id(weight) if weight.values.is_meta else weight.values.data_ptr()


def lacks_numbers(model: nn.Module) -> bool:
    """Whether a grouped layer of a model only describes its weight."""
    return any(module.grouped.values.is_meta for module in model.modules() if isinstance(module, _GroupedLayer))


@contextmanager
def zero_products(model: nn.Module) -> Iterator[None]:
    """Let grouped layers return zeros meanwhile: their references take seconds for a large model."""
    layers = [module for module in model.modules() if isinstance(module, _GroupedLayer)]
    for layer in layers:
        layer.yields_zeros = True
    try:
        yield
    finally:
        for layer in layers:
            layer.yields_zeros = False


def grouped_bytes(model: nn.Module) -> int:
    """Bytes of the grouped weights of a model, each counted once."""
    layers = [module.grouped for module in model.modules() if isinstance(module, _GroupedLayer)]
    return sum({key_of(weight): weight.num_bytes for weight in layers}.values())


def num_grouped(model: nn.Module) -> int:
    """Weights that the grouped layers of a model stand for, each counted once."""
    layers = [module.grouped for module in model.modules() if isinstance(module, _GroupedLayer)]
    counts = {key_of(weight): weight.shape[0] * weight.shape[1] for weight in layers}
    return sum(counts.values())


def output_width(layer: Any) -> int:
    """Outputs of a dense or grouped linear layer, or of all ranks' parts of one."""
    if (columns := getattr(layer, "columns", None)) is not None:
        return int(columns.total)
    width: int = layer.grouped.shape[0] if isinstance(layer, GroupedLinear) else layer.weight.shape[0]
    return width


def linear_paths(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers of a model, as `replace_linears` finds them."""
    kinds = (nn.Linear, Conv1D)
    return [path for path, layer in model.named_modules() if type(layer) in kinds or isinstance(layer, GroupedLinear)]


def replace_linears(model: nn.Module, make: MakeLinear, *, only_last: bool = False) -> None:
    """Replace every linear layer of a model by `make`'s, or only the output layer, freeing each in turn. A
    grouped output layer keeps its sums from then on."""
    last = _id_of_last(model)
    for parent in [module for module in model.modules() if type(module) not in (nn.Linear, Conv1D)]:
        for name, child in list(parent.named_children()):
            is_last = id(child) == last
            if only_last and not is_last:
                continue
            if isinstance(child, GroupedLinear):
                child.keeps_sums = is_last
            elif type(child) is nn.Linear:
                setattr(parent, name, make(child.weight, child.bias, is_last))
            elif type(child) is Conv1D:
                setattr(parent, name, make(child.weight.T, child.bias, is_last))


def _id_of_last(model: Any) -> int | None:
    """Id of the layer that gives logits, or of a rank's part of it; holding the layer itself would keep its weight."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    last = model.get_output_embeddings()
    return id(getattr(last, "own", last))
