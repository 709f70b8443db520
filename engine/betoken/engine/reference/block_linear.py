"""Linear layers by stock products over blocks of 16 rows. A stock product changes a row's last bits with the number of
rows, so every product has the same shape.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_BLOCK_ROWS = 16
_WIDENED_OUTPUTS = 4096
"""Rows of a half type's weight that are float32 at a time."""


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
