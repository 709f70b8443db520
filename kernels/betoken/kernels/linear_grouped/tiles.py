"""The sum over one range of K by a weight of few bits, for the Triton kernels: a tile is dequantised once for all rows.

A step stays within one group: its codes are multiplied unscaled, which half types represent exactly, and the sum is
scaled in float32. Numbers of a table that bfloat16 does not hold are multiplied in three parts that add up to them.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from betoken.kernels.linear_grouped.codes import FACTORS, INEXACT, TABLES, CodeKind
from betoken.kernels.linear_grouped.weight import Grouped
from betoken.kernels.product_tiles import BLOCK_OUTPUTS, SumOrder

_COMPUTED = "e2m1"
"""The kind whose table the kernel computes."""


class Tiles(NamedTuple):
    """A launch's arguments for a weight [N, K], or for several one below the other."""

    order: SumOrder
    tensors: tuple[Tensor | None, ...]
    """In the kernels' order of arguments."""
    constants: dict[str, Any]

    @classmethod
    def of(cls, weight: Grouped, num_outputs: int, dtype: torch.dtype) -> "Tiles":
        """For rows of a dtype; `num_outputs`: of the product, or of the whole layer if the product is a part of it."""
        is_inexact = weight.kind in INEXACT
        has_table = weight.kind in TABLES and weight.kind != _COMPUTED
        order = SumOrder.of(num_outputs, weight.num_inputs, dtype, weight.group)
        scales = "units" if weight.scale_units is not None else "numbers"
        if weight.scales.dtype == torch.float8_e8m0fnu:
            scales = "powers"
        constants = {
            "KIND": weight.kind,
            "SCALES": scales,
            "ZERO": weight.zero,
            "GROUP": weight.group,
            "FACTOR": FACTORS.get(weight.kind, 1.0),
            "NUM_PARTS": 3 if is_inexact and dtype == torch.bfloat16 else 1,
            "RANGE_BLOCKS": order.range_blocks,
            "IS_EVEN": order.is_even(weight.num_inputs),
            # The interpreter has no product of bfloat16: their float32 products are the same numbers.
            "IN_FLOAT32": dtype == torch.float32 or is_interpreted() or (is_inexact and dtype == torch.float16),
            "BLOCK_OUTPUTS": BLOCK_OUTPUTS,
            "BLOCK_INPUTS": order.block_inputs,
        }
        table = _table(weight.kind, weight.values.device) if has_table else None
        tensors = (
            *(weight.values.view(torch.uint8), weight.high),
            *(weight.scales.view(torch.uint8) if scales == "powers" else weight.scales, weight.scale_units),
            *(weight.zeros, weight.offsets, weight.offset_units, table),
        )
        return cls(order, tensors, constants)


@lru_cache
def _table(kind: CodeKind, device: torch.device) -> Tensor:
    """The numbers of a kind's codes, float32; copied to a device once, which while a graph is recorded none may be."""
    return torch.tensor(TABLES[kind], device=device)


def is_interpreted() -> bool:
    """Whether kernels are interpreted on CPU tensors."""
    from triton.runtime.interpreter import InterpretedFunction

    return isinstance(sum_grouped_range, InterpretedFunction)


@triton.jit
def sum_grouped_range(
    row_starts,  # [BLOCK_ROWS] pointers
    values_ptr,
    high_ptr,
    scales_ptr,
    scale_units_ptr,
    zeros_ptr,
    offsets_ptr,
    offset_units_ptr,
    table_ptr,
    weight_rows,  # [BLOCK_OUTPUTS] int64: rows of the weight's tensors
    first_block,
    num_inputs,
    KIND: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANGE_BLOCKS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IN_FLOAT32: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """[BLOCK_OUTPUTS, BLOCK_ROWS] float32: the sums over one range of K."""
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    num_groups = (num_inputs + GROUP - 1) // GROUP
    num_units = (num_inputs + 255) // 256
    for step in range(RANGE_BLOCKS):
        first = (first_block + step) * BLOCK_INPUTS
        inputs = (first + tl.arange(0, BLOCK_INPUTS)).to(tl.int64)
        places = row_starts[:, None] + inputs[None, :]
        if IS_EVEN:
            x = tl.load(places)
        else:
            x = tl.load(places, mask=(inputs < num_inputs)[None, :], other=0.0)
        numbers = _numbers(
            values_ptr, high_ptr, table_ptr, weight_rows, first, inputs, num_inputs, KIND, IS_EVEN, BLOCK_INPUTS
        )
        # Ranges may go on behind the last input, where x is 0: the last group serves.
        group = tl.minimum(first // GROUP, num_groups - 1)
        unit = tl.minimum(first // 256, num_units - 1)
        if ZERO != 0:
            numbers -= ZERO
        if zeros_ptr is not None:
            numbers -= tl.load(zeros_ptr + weight_rows * num_groups + group).to(tl.float32)[:, None]
        scale = _scale(scales_ptr, scale_units_ptr, weight_rows, group, unit, num_groups, num_units, SCALES) * FACTOR
        for _ in tl.static_range(NUM_PARTS):
            part = numbers if IN_FLOAT32 and NUM_PARTS == 1 else numbers.to(x.dtype)
            if IN_FLOAT32:
                product = tl.dot(part.to(tl.float32), tl.trans(x.to(tl.float32)), input_precision="ieee")
            else:
                product = tl.dot(part, tl.trans(x))
            sums = tl.fma(product, tl.broadcast_to(scale[:, None], [BLOCK_OUTPUTS, BLOCK_ROWS]), sums)
            numbers -= part.to(tl.float32)
        if offsets_ptr is not None:
            ones = tl.full([BLOCK_OUTPUTS, BLOCK_INPUTS], 1.0, tl.float32)
            if IN_FLOAT32:
                total = tl.dot(ones, tl.trans(x.to(tl.float32)), input_precision="ieee")
            else:
                # No sum of the compiler's, whose order follows the rows of a tile.
                total = tl.dot(ones.to(x.dtype), tl.trans(x))
            offset = _offset(offsets_ptr, offset_units_ptr, weight_rows, group, unit, num_groups, num_units)
            sums = tl.fma(total, tl.broadcast_to(offset[:, None], [BLOCK_OUTPUTS, BLOCK_ROWS]), sums)
    return sums


@triton.jit
def _scale(scales_ptr, units_ptr, weight_rows, group, unit, num_groups, num_units, SCALES: tl.constexpr):
    scale = tl.load(scales_ptr + weight_rows * num_groups + group)
    if SCALES == "powers":
        power = scale.to(tl.int32)
        scale = tl.where(power == 0, 0x00400000, power << 23).to(tl.float32, bitcast=True)
    elif SCALES == "units":
        scale = scale.to(tl.float32) * tl.load(units_ptr + weight_rows * num_units + unit).to(tl.float32)
    else:
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def _offset(offsets_ptr, units_ptr, weight_rows, group, unit, num_groups, num_units):
    offset = tl.load(offsets_ptr + weight_rows * num_groups + group).to(tl.float32)
    if units_ptr is not None:
        offset *= tl.load(units_ptr + weight_rows * num_units + unit).to(tl.float32)
    return offset


@triton.jit
def _numbers(
    values_ptr,
    high_ptr,
    table_ptr,
    weight_rows,
    first,
    inputs,
    num_inputs,
    KIND: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """[BLOCK_OUTPUTS, BLOCK_INPUTS] float32: what the codes stand for, neither zero nor scale applied."""
    if KIND == "int8" or KIND == "snorm8":
        codes = _bits(values_ptr, weight_rows, inputs, num_inputs, 8, IS_EVEN)
        numbers = codes.to(tl.int8).to(tl.float32)
    elif KIND == "float8":
        numbers = _small_float(_bits(values_ptr, weight_rows, inputs, num_inputs, 8, IS_EVEN), 4, 3)
    elif KIND == "int2":
        numbers = _bits(values_ptr, weight_rows, inputs, num_inputs, 2, IS_EVEN).to(tl.float32)
    elif KIND == "int3" or KIND == "iq2" or KIND == "iq1":
        codes = _bits(values_ptr, weight_rows, inputs, num_inputs, 2, IS_EVEN)
        codes |= _bits(high_ptr, weight_rows, inputs, num_inputs, 1, IS_EVEN) << 2
        if table_ptr is not None:
            numbers = tl.load(table_ptr + codes)
        else:
            numbers = codes.to(tl.float32)
    else:
        nibbles = _nibbles(values_ptr, weight_rows, first, num_inputs, IS_EVEN, BLOCK_INPUTS)
        if KIND == "e2m1":
            numbers = _small_float(nibbles, 2, 1)
        elif table_ptr is not None:
            numbers = tl.load(table_ptr + nibbles)
        else:
            if KIND == "int5":
                nibbles |= _bits(high_ptr, weight_rows, inputs, num_inputs, 1, IS_EVEN) << 4
            if KIND == "int6":
                nibbles |= _bits(high_ptr, weight_rows, inputs, num_inputs, 2, IS_EVEN) << 4
            numbers = nibbles.to(tl.float32)
    return numbers


@triton.jit
def _nibbles(values_ptr, weight_rows, first, num_inputs, IS_EVEN: tl.constexpr, BLOCK_INPUTS: tl.constexpr):
    """Each byte is read once: the low halves are the even inputs."""
    width = (num_inputs + 1) // 2
    columns = first // 2 + tl.arange(0, BLOCK_INPUTS // 2)
    places = values_ptr + weight_rows[:, None] * width + columns[None, :]
    if IS_EVEN:
        packed = tl.load(places)
    else:
        packed = tl.load(places, mask=(columns < width)[None, :], other=0)
    packed = packed.to(tl.int32)
    return tl.interleave(packed & 15, packed >> 4)


@triton.jit
def _bits(packed_ptr, weight_rows, inputs, num_inputs, BITS: tl.constexpr, IS_EVEN: tl.constexpr):
    width = (num_inputs * BITS + 7) // 8
    places = packed_ptr + weight_rows[:, None] * width + (inputs * BITS // 8)[None, :]
    if IS_EVEN:
        packed = tl.load(places)
    else:
        packed = tl.load(places, mask=(inputs < num_inputs)[None, :], other=0)
    packed = packed.to(tl.int32)
    if BITS < 8:
        packed = (packed >> (inputs * BITS % 8).to(tl.int32)[None, :]) & ((1 << BITS) - 1)
    return packed


@triton.jit
def _small_float(codes, EXPONENT_BITS: tl.constexpr, MANTISSA_BITS: tl.constexpr):
    """Floats without infinities, by whole numbers: no step of it has subnormal ones."""
    exponent = (codes >> MANTISSA_BITS) & ((1 << EXPONENT_BITS) - 1)
    mantissa = codes & ((1 << MANTISSA_BITS) - 1)
    whole = tl.where(exponent > 0, mantissa + (1 << MANTISSA_BITS), mantissa)
    power = tl.maximum(exponent, 1) + (128 - (1 << (EXPONENT_BITS - 1)) - MANTISSA_BITS)
    number = whole.to(tl.float32) * (power << 23).to(tl.float32, bitcast=True)
    return tl.where((codes >> (EXPONENT_BITS + MANTISSA_BITS)) != 0, -number, number)
