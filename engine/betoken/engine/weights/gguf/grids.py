"""The blocks of GGUF types whose codes are indices into a grid: IQ1, IQ2 and IQ3.

A grid lists the vectors of 4 or 8 levels that ggml allows. They are expanded into one code for each weight, of 3 or 4
bits; scales keep their bits. Source: ggml-quants.c (`dequantize_row_iq*`); the package `gguf` holds the grids.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import HIGH_BITS, CodeKind, pack

_FOUR, _TWO = torch.tensor([0, 2, 4, 6], dtype=torch.uint8), torch.tensor([0, 4], dtype=torch.uint8)
_EIGHT = torch.arange(8, dtype=torch.uint8)
_SEVENS = torch.tensor([0, 7, 14, 21])
_THREES = torch.tensor([0, 3, 6, 9])


class _Parts(NamedTuple):
    """The fields of blocks."""

    units: Tensor
    """[N, B] float16."""
    vectors: Tensor
    """[N, vectors] of the grid, any integers."""
    signs: Tensor
    """[N, K / 8] uint8: bit i belongs to input i of eight."""
    scales: Tensor
    """[N, groups]: s, of a scale of 2 s + 1 units."""


def grid_reader(
    grid: str, kind: CodeKind, group: int, split: Callable[[Tensor], _Parts]
) -> Callable[[Tensor, int], Grouped]:
    """How a weight is read from blocks [N, B, bytes] of 256 inputs each.

    Args:
        grid: type of the package whose grid it has.
        split: fields of the blocks.
    """

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        parts = split(blocks)
        levels = _levels(grid)[parts.vectors.long()].flatten(1)
        signs = (parts.signs[..., None] >> _EIGHT & 1).flatten(1)
        is_three = kind in HIGH_BITS
        return Grouped(
            kind=kind,
            num_inputs=num_inputs,
            group=group,
            values=pack(levels, 2) if is_three else pack(levels | signs << 3, 4),
            high=parts.signs.contiguous() if is_three else None,
            scales=(2 * parts.scales + 1).to(torch.uint8).contiguous(),
            scale_units=parts.units.contiguous(),
        )

    return read


@cache
def _levels(grid: str) -> Tensor:
    """Places of a grid's levels among all levels, uint8 [vectors, 4 or 8]."""
    table: Any = getattr(quants, grid)
    table.init_grid()
    return torch.from_numpy(np.searchsorted(table.grid_map, table.grid[0, 0]).astype(np.uint8))


@cache
def _sign_bytes() -> Tensor:
    """Seven bits -> eight signs, an even number of which is negative; uint8 [128]."""
    return torch.from_numpy(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8).copy())


def _words(data: Tensor, width: int) -> Tensor:
    """Bytes [N, B, n * width], little-endian -> [N, B * n] int64."""
    places = 8 * torch.arange(width)
    return (data.reshape(*data.shape[:-1], -1, width).long() << places).sum(-1).flatten(1)


def _fields(data: Tensor, shifts: Tensor, mask: int) -> Tensor:
    """Words [N, ...] -> [N, all of their fields], the first shift first."""
    return (data.flatten(1)[..., None] >> shifts & mask).flatten(1)


def _half(blocks: Tensor) -> Tensor:
    """The float16 that begins each block."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0]


def _iq2_xxs(blocks: Tensor) -> _Parts:
    words = blocks[..., 2:].reshape(*blocks.shape[:-1], 8, 8)
    rest = _words(words[..., 4:].flatten(2), 4)
    signs = _sign_bytes()[_fields(rest, _SEVENS, 127)]
    return _Parts(_half(blocks), words[..., :4].flatten(1), signs, rest >> 28)


def _iq2_xs(blocks: Tensor) -> _Parts:
    words = _words(blocks[..., 2:66], 2)
    return _Parts(_half(blocks), words & 511, _sign_bytes()[words >> 9], _fields(blocks[..., 66:], _TWO, 15))


def _iq2_s(blocks: Tensor) -> _Parts:
    vectors = blocks[..., 2:34].flatten(1).int() | _fields(blocks[..., 66:74], _FOUR, 3).int() << 8
    return _Parts(_half(blocks), vectors, blocks[..., 34:66].flatten(1), _fields(blocks[..., 74:], _TWO, 15))


def _iq3_xxs(blocks: Tensor) -> _Parts:
    rest = _words(blocks[..., 66:], 4)
    signs = _sign_bytes()[_fields(rest, _SEVENS, 127)]
    return _Parts(_half(blocks), blocks[..., 2:66].flatten(1), signs, rest >> 28)


def _iq3_s(blocks: Tensor) -> _Parts:
    vectors = blocks[..., 2:66].flatten(1).int() | _fields(blocks[..., 66:74], _EIGHT, 1).int() << 8
    return _Parts(_half(blocks), vectors, blocks[..., 74:106].flatten(1), _fields(blocks[..., 106:], _TWO, 15))


def _iq1_s(blocks: Tensor) -> _Parts:
    """An eighth is added to every level; the signs belong to it."""
    words = _words(blocks[..., 34:], 2)
    vectors = blocks[..., 2:34].flatten(1).int() | _fields(words, _THREES, 7).int() << 8
    signs = (255 * (1 - (words >> 15))).to(torch.uint8).repeat_interleave(4, dim=1)
    return _Parts(_half(blocks), vectors, signs, words >> 12 & 7)


def _iq1_m(blocks: Tensor) -> _Parts:
    """As `_iq1_s`; the unit is in the highest bits of four words of scales."""
    words = _words(blocks[..., 48:], 2)
    units = ((words.reshape(len(words), -1, 4) >> 12) << torch.tensor([0, 4, 8, 12])).sum(-1)
    fields = _fields(blocks[..., 32:48], _TWO, 15)
    vectors = blocks[..., :32].flatten(1).int() | (fields & 7).int() << 8
    signs = 255 * (1 - (fields >> 3))
    return _Parts(units.to(torch.int16).view(torch.float16), vectors, signs, _fields(words, _THREES, 7))


GRID_READERS = {
    "IQ2_XXS": (66, grid_reader("IQ2_XXS", "iq2", 32, _iq2_xxs)),
    "IQ2_XS": (74, grid_reader("IQ2_XS", "iq2", 16, _iq2_xs)),
    "IQ2_S": (82, grid_reader("IQ2_S", "iq2", 16, _iq2_s)),
    "IQ3_XXS": (98, grid_reader("IQ3_XXS", "iq3_xxs", 32, _iq3_xxs)),
    "IQ3_S": (110, grid_reader("IQ3_S", "iq3_s", 32, _iq3_s)),
    "IQ1_S": (50, grid_reader("IQ1_S", "iq1", 32, _iq1_s)),
    "IQ1_M": (56, grid_reader("IQ1_M", "iq1", 16, _iq1_m)),
}
"""By type: bytes of a block, and how a weight is read from blocks [N, number, bytes]."""
