"""Weights of few bits in the CPU kernels' own layout (grouped.h), for the operators that read them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.kernels.linear_grouped.weight import Grouped

COLUMNS = 32
"""Packed weights of one format may be joined where they end on a whole group of columns (kColumns of grouped.h)."""

_CODES = {"int4": 4, "int5": 5, "int6": 6, "int8": 8, "float8": 9}
_NUMBERS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_UNSIGNED_UNITS, _SIGNED_UNITS = 4, 5
_ZEROS = {torch.uint8: 6, torch.int8: 7}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] as the kernels read it."""

    data: Tensor
    """uint8, flat."""
    num_outputs: int
    num_inputs: int
    code: int
    """The format's number, which operators take."""

    @classmethod
    def of(cls, weight: Grouped) -> "PackedWeight":
        """Pack a weight; its source may be freed afterwards. The CPU kernels must be loaded."""
        code = code_of(weight)
        offsets = weight.zeros if weight.zeros is not None else weight.offsets
        data = torch.ops.betoken.pack_grouped(
            weight.values,
            weight.high,
            weight.scales,
            weight.scale_units,
            offsets,
            weight.offset_units,
            weight.num_inputs,
            code,
        )
        return cls(data, *weight.shape, code)


def code_of(weight: Grouped) -> int:
    """The format's number: kinds of code, scale and offset, constant zero, group (`GroupedFormat::of`)."""
    scale = _number(weight.scales, weight.scale_units)
    offset = 0 if weight.offsets is None else _number(weight.offsets, weight.offset_units)
    if weight.zeros is not None:
        offset = _ZEROS[weight.zeros.dtype]
    return _CODES[weight.kind] | scale << 8 | offset << 16 | weight.zero << 24 | weight.group << 32


def _number(numbers: Tensor, units: Tensor | None) -> int:
    if units is None:
        return _NUMBERS[numbers.dtype]
    return _SIGNED_UNITS if numbers.dtype == torch.int8 else _UNSIGNED_UNITS
