"""Linear layers with independent rows. A stock float32 product changes a row's last bits with the number of rows. Here
every output is one sum in one order (packed), or every product has one shape (block).

The layer that gives logits keeps its float32 sums: rounded to a half type, many a position has two best logits.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from betoken.engine.weights.layers import GroupedLinear

_BLOCK_ROWS = 16
_WIDENED_OUTPUTS = 4096
"""Rows of a half type's weight that are float32 at a time."""

MakeLinear = Callable[[Tensor, Tensor | None, bool], nn.Module]
"""weight [N, K], bias [N] or None, whether the result is the float32 sums -> the layer's replacement."""


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


class BlockLinear(nn.Module):
    """y = x W^T + b over blocks of exactly 16 rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keeps_sums: bool = False) -> None:
        super().__init__()
        self._is_widened = keeps_sums and weight.dtype != torch.float32
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N], dtype of the weight or float32."""
        rows = x.reshape(-1, x.shape[-1])
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK_ROWS))
        if self._is_widened:
            starts = range(0, len(self.weight), _WIDENED_OUTPUTS)
            out = torch.cat([self._sums(padded.float(), slice(start, start + _WIDENED_OUTPUTS)) for start in starts], 1)
        else:
            out = _by_blocks(padded, self.weight, self.bias)
        return out[: len(rows)].reshape(*x.shape[:-1], -1)

    def _sums(self, rows: Tensor, outputs: slice) -> Tensor:
        bias = None if self.bias is None else self.bias[outputs].float()
        return _by_blocks(rows, self.weight[outputs].float(), bias)


def _by_blocks(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([functional.linear(block, weight, bias) for block in torch.split(rows, _BLOCK_ROWS)])


class BlockProducts(TorchFunctionMode):
    """Makes every product of rows and a matrix one over blocks of 16 rows: linear layers, and routers' bare parameters.

    Stock products of half types seem equal per row, but narrow ones (16 outputs) were found to differ.
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear and args[1].dim() == 2:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK_ROWS))
        return _by_blocks(padded, weight, bias)[: len(rows)].reshape(*x.shape[:-1], -1)


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
    """Id of the layer that gives logits; holding the layer itself would keep its weight."""
    return id(model.get_output_embeddings()) if hasattr(model, "get_output_embeddings") else None
