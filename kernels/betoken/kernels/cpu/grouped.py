"""Weights of few bits in the CPU kernels' own layout (grouped.h), for the operators that read them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.kernels.linear_grouped.codes import CodeKind
from betoken.kernels.linear_grouped.weight import Grouped

COLUMNS = 32
"""Packed weights of one format may be joined if they end on a whole group of columns (kColumns of grouped.h)."""

_CODES: Mapping[CodeKind, int] = {
    **{"int2": 2, "int3": 3, "int4": 4, "int5": 5, "int6": 6, "int8": 8, "float8": 9, "snorm8": 10},
    **{"e2m1": 11, "nf4": 12, "fp4": 13, "iq4": 14, "iq3_xxs": 15, "iq3_s": 16, "iq2": 17, "iq1": 18},
}
_NUMBERS = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float8_e8m0fnu: 8}
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

    @property
    def format_name(self) -> str:
        """Kind and group of the codes."""
        kind = next(kind for kind, number in _CODES.items() if number == self.code & 255)
        return f"{kind} codes in groups of {self.code >> 32}"

    @classmethod
    def of(cls, weight: Grouped) -> "PackedWeight":
        """Pack, inputs in the order of the codes; the source may be freed afterwards. The CPU kernels must be
        loaded."""
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


@dataclass(frozen=True, slots=True)
class PackedGrouped(Grouped):
    """A weight whose numbers exist in the kernels' layout only; its own tensors are on the meta device."""

    packed: PackedWeight | None = None


def pack_experts(weight: Grouped, num: int) -> PackedWeight:
    """The weights of `num` experts, [E * N, K] one below the other, for `expert_linear_grouped`: data [E, bytes]."""
    num_outputs = weight.shape[0] // num
    data: Tensor | None = None
    for expert in range(num):
        packed = PackedWeight.of(weight.rows(slice(expert * num_outputs, (expert + 1) * num_outputs)))
        data = torch.empty(num, packed.data.numel(), dtype=torch.uint8) if data is None else data
        data[expert] = packed.data
    assert data is not None, "a module of experts has some"
    return PackedWeight(data, num_outputs, weight.num_inputs, code_of(weight))


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
