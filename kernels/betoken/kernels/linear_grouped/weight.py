"""A weight as its checkpoint stores it: codes of 2 to 8 bits, and by groups along K a scale and an offset.

It is independent of the checkpoint format and of the product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from betoken.kernels.linear_grouped.codes import BYTE_DTYPES, FACTORS, HIGH_BITS, TABLES, VALUE_BITS, CodeKind, unpack

UNIT_INPUTS = 256
"""Inputs that share a unit, where scales are whole multiples of one."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_SCALES = (*_FLOATS, torch.float8_e8m0fnu)
_SLICE_NUMBERS = 1 << 18
"""Numbers of a slice. At load each layer runs once by the reference, which needs a few MB on top of the weight."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """A weight [N, K]: w = scale * (code - zero) + offset, each operation in float32.

    Codes of the kinds in `TABLES` are indices into a table, codes of `snorm8` are parts of 127.

    Raises:
        ValueError: a tensor's shape, dtype or device does not fit; the message names it.
    """

    kind: CodeKind
    """Kind of the codes: an unsigned integer of 2 to 6 bits, a signed one of 8, a float of 8 (E4M3), or an index of 3
    or 4 bits into a table."""
    num_inputs: int
    """K."""
    group: int
    """Inputs that share a scale; 16 or a multiple of 32."""
    values: Tensor
    """Codes: uint8 [N, ceil(K / 2)], their low 4 bits, even inputs in the low half; [N, ceil(K / 4)] for codes of 2 and
    3 bits, their low 2 bits, lowest inputs in the lowest bits; or int8 or float8_e4m3fn [N, K]."""
    scales: Tensor
    """[N, G] float or float8_e8m0fnu, G = ceil(K / group); or uint8 or int8, multiples of `scale_units`."""
    high: Tensor | None = None
    """Bits of the codes above those in `values`, lowest inputs in the lowest bits: uint8 [N, ceil(K / 8)] for one bit
    (codes of 3 and 5 bits), [N, ceil(K / 4)] for two (`int6`)."""
    scale_units: Tensor | None = None
    """[N, ceil(K / 256)] float16."""
    zero: int = 0
    """Subtracted from every code, 0 to 255."""
    zeros: Tensor | None = None
    """[N, G] uint8, or int8 with `int8` codes: subtracted from the codes of a group besides."""
    offsets: Tensor | None = None
    """[N, G] float; or uint8, multiples of `offset_units`. Only where scale times code is exact in float32, so that the
    number is rounded once however it is computed: codes of 2, 4 and 5 bits, scales other than float32, no zeros."""
    offset_units: Tensor | None = None
    """[N, ceil(K / 256)] float16."""
    order: Tensor | None = None
    """[K] int32: which input each place of the codes belongs to; None is their own order."""

    def __post_init__(self) -> None:
        num_outputs, k = self.values.shape[0], self.num_inputs
        if self.group != 16 and (self.group < 32 or self.group % 32):
            raise ValueError(f"group: {self.group} is neither 16 nor a multiple of 32")
        if not 0 <= self.zero <= 255:
            raise ValueError(f"zero: {self.zero} is outside 0 to 255")
        if self.offsets is not None and (
            self.zeros is not None or self.kind not in ("int2", "int4", "int5") or self.scales.dtype == torch.float32
        ):
            raise ValueError(
                f"offsets: not with zeros, {self.kind} codes or {self.scales.dtype} scales, inexact products"
            )
        num_groups, num_units = -(-k // self.group), -(-k // UNIT_INPUTS)
        bits = VALUE_BITS.get(self.kind, 8)
        self._check("values", self.values, -(-k * bits // 8), BYTE_DTYPES.get(self.kind, torch.uint8))
        if not self.kind.startswith("int") and (self.zero or self.zeros is not None):
            raise ValueError(f"zeros: not with {self.kind} codes")
        high_bits = HIGH_BITS.get(self.kind, 0)
        if (self.high is None) != (high_bits == 0):
            raise ValueError(f"high: {self.kind} codes have {high_bits} bits above their low {bits}")
        for name, width, dtypes in (
            ("high", -(-k * high_bits // 8), (torch.uint8,)),
            ("scales", num_groups, _SCALES if self.scale_units is None else (torch.uint8, torch.int8)),
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
        if self.order is not None and (self.order.dtype != torch.int32 or self.order.shape != (k,)):
            raise ValueError(f"order: {list(self.order.shape)} {self.order.dtype}, not [{k}] of torch.int32")

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
        taken: dict[str, Any] = {
            name: tensor[index].contiguous() for name, tensor in self.tensors().items() if name != "order"
        }
        return replace(self, **taken)

    def copied_rows(self, rows: slice) -> "Grouped":
        """The weight of these outputs in separate memory, so that the other outputs can be freed."""
        found = self.rows(rows)
        copies: dict[str, Any] = {name: tensor.clone() for name, tensor in found.tensors().items() if name != "order"}
        return replace(found, **copies)

    def described(self) -> "Grouped":
        """The weight without its numbers: its tensors, except `order`, are on the meta device."""
        shapes: dict[str, Any] = {name: tensor.to("meta") for name, tensor in self.tensors().items() if name != "order"}
        return replace(self, **shapes)

    def dequantised(self) -> Tensor:
        """[N, K] float32: the numbers that it stands for."""
        numbers = self._codes()  # changed in place: new memory takes longer than the arithmetic
        if self.zero:
            numbers.sub_(self.zero)
        if self.zeros is not None:
            numbers.sub_(self._spread(self.zeros))
        numbers.mul_(self._spread(_in_units(self.scales, self.scale_units, self.group)))
        if self.offsets is not None:
            numbers.add_(self._spread(_in_units(self.offsets, self.offset_units, self.group)))
        if self.kind in FACTORS:
            numbers.mul_(FACTORS[self.kind])
        return numbers if self.order is None else torch.empty_like(numbers).index_copy_(1, self.order.long(), numbers)

    def slices(self) -> Iterator["Grouped"]:
        """The weight in parts of few outputs, so that one part at a time needs to be dequantised."""
        num_outputs, num_inputs = self.shape
        step = max(1, _SLICE_NUMBERS // max(1, num_inputs))
        for start in range(0, num_outputs, step):
            yield self.rows(slice(start, start + step))

    def _codes(self) -> Tensor:
        """[N, K] float32, in new memory."""
        if self.kind in BYTE_DTYPES:
            return self.values.float()
        codes = unpack(self.values, VALUE_BITS[self.kind], self.num_inputs)
        if self.high is not None:
            codes = codes | unpack(self.high, HIGH_BITS[self.kind], self.num_inputs) << VALUE_BITS[self.kind]
        if self.kind in TABLES:
            return torch.tensor(TABLES[self.kind], dtype=torch.float32, device=codes.device)[codes.int()]
        return codes.float()

    def _spread(self, by_group: Tensor) -> Tensor:
        """[N, G] -> [N, K] float32."""
        return _repeated(by_group.float(), self.group)[:, : self.num_inputs]


Weight = Tensor | Grouped
"""Weight of a linear layer: dense numbers [N, K], or a grouped weight."""


def below(weights: Sequence[Grouped]) -> Grouped:
    """Weights of the same inputs, at least one, as one [the sum of N, K].

    Raises:
        ValueError: they are not of one kind.
    """
    if any(weight.zeros is not None for weight in weights):
        weights = [_with_zeros(weight) for weight in weights]
    first = weights[0]
    for weight in weights:
        if _shape_of(weight) != _shape_of(first):
            raise ValueError(f"{_shape_of(weight)} and {_shape_of(first)}")
    if len(weights) == 1:
        return first
    if first.order is not None:
        raise ValueError("weights with different input orders")
    tensors = {name: torch.cat([getattr(weight, name) for weight in weights]) for name in first.tensors()}
    return replace(first, **cast(Any, tensors))


def _with_zeros(weight: Grouped) -> Grouped:
    if weight.zeros is not None:
        return weight
    dtype = torch.int8 if weight.kind == "int8" else torch.uint8
    return replace(weight, zero=0, zeros=torch.full(weight.scales.shape, weight.zero, dtype=dtype))


def _shape_of(weight: Grouped) -> tuple[Any, ...]:
    dtypes = {name: tensor.dtype for name, tensor in weight.tensors().items()}
    return weight.kind, weight.num_inputs, weight.group, weight.zero, dtypes


def in_order(x: Tensor, weight: Grouped) -> tuple[Tensor, Grouped]:
    """Rows [R, K] and a weight whose inputs come in the order of its codes."""
    if weight.order is None:
        return x, weight
    return x.index_select(1, weight.order), replace(weight, order=None)


def _in_units(numbers: Tensor, units: Tensor | None, group: int) -> Tensor:
    if units is None:
        return numbers.float()
    return numbers.float() * _repeated(units.float(), UNIT_INPUTS // group)[:, : numbers.shape[1]]


def _repeated(numbers: Tensor, count: int) -> Tensor:
    """[N, G] -> [N, G * count], each number `count` times; `repeat_interleave` takes several times as long."""
    return numbers[..., None].expand(*numbers.shape, count).flatten(1)
