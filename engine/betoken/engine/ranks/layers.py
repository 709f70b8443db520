"""Layers that compute the columns of one rank and gather the columns of all ranks. Every output is one sum over all
inputs, made by one rank, so its bits equal the whole layer's.

Gathering is an operator, so that compiled and recorded forwards gather, too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from betoken.engine.custom_operator import define_operator
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.columns import Columns
from betoken.kernels.linear_grouped import Grouped


class RankLinear(nn.Module):
    """y = x W^T + b, of which `own` computes the rank's columns."""

    def __init__(
        self,
        own: nn.Module,
        group: RankGroup,
        columns: Columns,
        inputs: Columns | None = None,
        gathers_output: bool = True,
    ) -> None:
        """Args:
        columns: of the output.
        inputs: columns of the input that the rank has; None = it has all.
        gathers_output: whether the result is the whole output; otherwise it is the rank's columns.
        """
        super().__init__()
        self.own = own
        self.group, self.columns = group, columns
        self._inputs, self._gathers_output = inputs, gathers_output
        self.is_whole = False
        """Whether input and output are whole, so that the code between layers has all columns."""

    @property
    def weight(self) -> Any:
        """The rank's columns, whose type and device are the whole layer's."""
        return self.own.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if self._inputs is not None and not self.is_whole:
            x = gather_columns(x, self.group, self._inputs)
        y: Tensor = self.own(x)
        return gather_columns(y, self.group, self.columns) if self._gathers_output or self.is_whole else y


class RankEmbedding(nn.Module):
    """Rows of a table, of which `own` holds the rank's."""

    def __init__(self, own: nn.Module, group: RankGroup, ids: Columns) -> None:
        """`ids`: whose rows the rank has."""
        super().__init__()
        self.own = own
        self.group, self.columns = group, ids

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]."""
        rows = self.own((ids - self.columns.start).clamp(0, self.columns.size - 1))
        stacked: Tensor = torch.ops.betoken_ranks.stack(rows, self.group.number, self.group.size)
        owners = torch.div(ids, self.columns.width, rounding_mode="floor")
        return stacked.gather(0, owners[None, ..., None].expand(1, *rows.shape))[0]


def num_on_other_ranks(model: nn.Module) -> int:
    """Weights of a model that other ranks have, each counted once."""
    found: dict[int, int] = {}
    for module in model.modules():
        for columns, weights in _parts_of(module):
            for weight in weights:
                if isinstance(weight, Grouped):
                    address, size = weight.values.data_ptr(), weight.shape[0] * weight.shape[1]
                else:
                    address, size = weight.data_ptr(), weight.numel()
                found[address] = size // columns.size * (columns.total - columns.size)
    return sum(found.values())


def _parts_of(module: Any) -> Iterator[tuple[Columns, list[Any]]]:
    """Weights of a module of which the rank has some columns."""
    if isinstance(module, (RankLinear, RankEmbedding)):
        own: Any = module.own
        yield module.columns, [*own.parameters(), *([own.grouped] if hasattr(own, "grouped") else [])]
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        if (gather := getattr(module, f"gather_{name}", None)) is not None:
            weights = [getattr(module, each, None) for each in (name, f"{name}_bias")]
            found = [getattr(weight, "grouped", weight) for weight in weights]
            yield gather.keywords["columns"], [weight for weight in found if weight is not None]


@contextmanager
def whole_layers(model: nn.Module) -> Iterator[None]:
    """Let every layer that ranks share have the input and the output of the whole layer meanwhile."""
    layers = [module for module in model.modules() if isinstance(module, RankLinear)]
    for layer in layers:
        layer.is_whole = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_whole = False


def gather_columns(x: Tensor, group: RankGroup, columns: Columns) -> Tensor:
    """Return the columns [..., total] of all ranks."""
    found: Tensor = torch.ops.betoken_ranks.gather_columns(x, group.number, columns.width, columns.total)
    return found


def _gather_columns(x: Tensor, number: int, width: int, total: int) -> Tensor:
    group = RankGroup.of(number)
    rows = x.reshape(-1, x.shape[-1])
    found = group.stack(functional.pad(rows, (0, width - rows.shape[1])) if rows.shape[1] < width else rows)
    whole = found.transpose(0, 1).reshape(rows.shape[0], -1)[:, :total]
    return whole.reshape(*x.shape[:-1], total).contiguous()  # as compiled code expects


def _gather_columns_shape(x: Tensor, number: int, width: int, total: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], total))


def _stack(x: Tensor, number: int, size: int) -> Tensor:
    return RankGroup.of(number).stack(x)


def _stack_shape(x: Tensor, number: int, size: int) -> Tensor:
    return x.new_empty((size, *x.shape))


_DEFINITIONS: dict[str, tuple[str, Any, Any]] = {
    "gather_columns": ("(Tensor x, int group, int width, int total) -> Tensor", _gather_columns, _gather_columns_shape),
    "stack": ("(Tensor x, int group, int size) -> Tensor", _stack, _stack_shape),
}
for _name, (_schema, _run, _shape) in _DEFINITIONS.items():
    define_operator(f"betoken_ranks::{_name}", _schema, _run, _shape)
