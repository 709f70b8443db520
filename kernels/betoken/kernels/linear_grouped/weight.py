"""A weight as its checkpoint stores it: codes of 4 to 8 bits, and by groups along K a scale and an offset.

It knows which number a code stands for, not where it came from or who multiplies it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

CodeKind = Literal["int4", "int5", "int6", "int8", "float8"]

UNIT_INPUTS = 256
"""Inputs that share a unit, where scales are whole multiples of one."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_HIGH_BITS = {"int5": 1, "int6": 2}
_SLICE_NUMBERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight [N, K]: w = scale * (code - zero) + offset, each operation in float32.

    Raises:
        ValueError: a tensor's shape, dtype or device does not fit; the message names it.
    """

    kind: CodeKind
    """What a code is: an unsigned integer of 4, 5 or 6 bits, a signed one of 8, or a float of 8 (E4M3)."""
    num_inputs: int
    """K."""
    group: int
    """Inputs that share a scale; a multiple of 16 that divides 256 or is divided by 32."""
    values: Tensor
    """Codes: uint8 [N, ceil(K / 2)], their low 4 bits, even inputs in the low half; or int8 or float8_e4m3fn [N, K]."""
    scales: Tensor
    """[N, G] float, G = ceil(K / group); or uint8 or int8, multiples of `scale_units`."""
    high: Tensor | None = None
    """The bits above the fourth: uint8 [N, ceil(K / 8)] for `int5`, [N, ceil(K / 4)] for `int6`, lowest inputs in the
    lowest bits."""
    scale_units: Tensor | None = None
    """[N, ceil(K / 256)] float16."""
    zero: int = 0
    """Subtracted from every code, 0 to 255."""
    zeros: Tensor | None = None
    """[N, G] uint8, or int8 with `int8` codes: subtracted from the codes of a group besides."""
    offsets: Tensor | None = None
    """[N, G] float; or uint8, multiples of `offset_units`. Only where scale times code is exact in float32, so that the
    number is rounded once however it is computed: codes of 4 and 5 bits, scales other than float32, no zeros."""
    offset_units: Tensor | None = None
    """[N, ceil(K / 256)] float16."""

    def __post_init__(self) -> None:
        num_outputs, k = self.values.shape[0], self.num_inputs
        if self.group < 16 or self.group % 16 or (self.group % 32 and UNIT_INPUTS % self.group):
            raise ValueError(f"group: {self.group} is neither 16 nor a multiple of 32")
        if not 0 <= self.zero <= 255:
            raise ValueError(f"zero: {self.zero} is outside 0 to 255")
        if self.offsets is not None and (
            self.zeros is not None or self.kind not in ("int4", "int5") or self.scales.dtype == torch.float32
        ):
            raise ValueError(
                f"offsets: not with zeros, {self.kind} codes or {self.scales.dtype} scales, inexact products"
            )
        num_groups, num_units = -(-k // self.group), -(-k // UNIT_INPUTS)
        if self.kind == "float8":
            self._check("values", self.values, k, torch.float8_e4m3fn)
        elif self.kind == "int8":
            self._check("values", self.values, k, torch.int8)
        else:
            self._check("values", self.values, -(-k // 2), torch.uint8)
        high_bits = _HIGH_BITS.get(self.kind, 0)
        if (self.high is None) != (high_bits == 0):
            raise ValueError(
                f"high: {self.kind} codes have {4 + high_bits if high_bits else 'no'} bits above the fourth"
            )
        for name, width, dtypes in (
            ("high", -(-k * high_bits // 8), (torch.uint8,)),
            ("scales", num_groups, _FLOATS if self.scale_units is None else (torch.uint8, torch.int8)),
            ("scale_units", num_units, (torch.float16,)),
            ("zeros", num_groups, (torch.uint8, torch.int8) if self.kind == "int8" else (torch.uint8,)),
            ("offsets", num_groups, _FLOATS if self.offset_units is None else (torch.uint8,)),
            ("offset_units", num_units, (torch.float16,)),
        ):
            tensor = getattr(self, name)
            if tensor is not None:
                self._check(name, tensor, width, *dtypes)
                if tensor.shape[0] != num_outputs:
                    raise ValueError(f"{name}: {tensor.shape[0]} rows, not {num_outputs} as values")

    def _check(self, name: str, tensor: Tensor, width: int, *dtypes: torch.dtype) -> None:
        if tensor.dim() != 2 or tensor.shape[1] != width or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {list(tensor.shape)} {tensor.dtype}, not contiguous [N, {width}] of"
                f" {' or '.join(str(dtype) for dtype in dtypes)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.values.shape[0], self.num_inputs

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by field."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if isinstance(value, Tensor)}

    def rows(self, index: slice | Tensor) -> "Grouped":
        """The weight of these outputs, a slice or int64 ids [n]."""
        taken: dict[str, Any] = {name: tensor[index].contiguous() for name, tensor in self.tensors().items()}
        return replace(self, **taken)

    def dequantised(self) -> Tensor:
        """[N, K] float32: the numbers that it stands for."""
        codes = self._codes() - self.zero
        if self.zeros is not None:
            codes = codes - self._spread(self.zeros)
        numbers = codes * self._spread(_in_units(self.scales, self.scale_units, self.group))
        if self.offsets is not None:
            numbers = numbers + self._spread(_in_units(self.offsets, self.offset_units, self.group))
        return numbers

    def slices(self) -> Iterator["Grouped"]:
        """The weight in parts of few outputs, so that one part at a time needs to be dequantised."""
        num_outputs, num_inputs = self.shape
        step = max(1, _SLICE_NUMBERS // max(1, num_inputs))
        for start in range(0, num_outputs, step):
            yield self.rows(slice(start, start + step))

    def _codes(self) -> Tensor:
        """[N, K] float32."""
        if self.kind in ("int8", "float8"):
            return self.values.float()
        codes = _unpack(self.values, 4, self.num_inputs)
        if self.high is not None:
            codes = codes | _unpack(self.high, _HIGH_BITS[self.kind], self.num_inputs) << 4
        return codes.float()

    def _spread(self, by_group: Tensor) -> Tensor:
        """[N, G] -> [N, K] float32."""
        return by_group.float().repeat_interleave(self.group, dim=1)[:, : self.num_inputs]


Weight = Tensor | Grouped
"""What a linear layer is made of: dense numbers [N, K], or a grouped weight."""


def _unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [N, ceil(width * bits / 8)] -> uint8 [N, width], lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :width]


def _in_units(numbers: Tensor, units: Tensor | None, group: int) -> Tensor:
    if units is None:
        return numbers.float()
    return numbers.float() * units.float().repeat_interleave(UNIT_INPUTS // group, dim=1)[:, : numbers.shape[1]]
