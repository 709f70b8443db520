"""The blocks of GGUF tensors as grouped weights: bits are moved, and no number is changed.

Source: ggml's ggml-quants.c (`dequantize_row_*`). It knows blocks, not files or models.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.gguf.grids import GRID_READERS
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import CodeKind, pack

_SLICE_WEIGHTS = 1 << 22
"""Weights that are read at a time: the intermediate results take a few bytes each."""


def read_blocks(type_name: str, blocks: Tensor, num_inputs: int, name: str) -> Grouped:
    """The weight of a tensor's bytes, uint8 [N, bytes of K inputs]; `name` is used in errors.

    Raises:
        ModelRefusedError: a scale or an offset is not finite.
    """
    block_bytes, read = _READERS[type_name]
    weight = _in_slices(read, blocks.reshape(blocks.shape[0], -1, block_bytes), num_inputs)
    for field in ("scales", "scale_units", "offsets", "offset_units"):
        numbers = getattr(weight, field)
        if numbers is not None and numbers.is_floating_point() and not bool(numbers.float().isfinite().all()):
            raise ModelRefusedError(f"tensor {name!r}, {type_name}: {field} that are not finite")
    return weight


def _in_slices(read: Callable[[Tensor, int], Grouped], blocks: Tensor, num_inputs: int) -> Grouped:
    """Read a few outputs at a time, so that intermediate results stay small."""
    tensors: dict[str, Tensor] = {}
    step = max(1, _SLICE_WEIGHTS // num_inputs)
    for start in range(0, len(blocks), step):
        part = read(blocks[start : start + step], num_inputs)
        for name, numbers in part.tensors().items():
            if name not in tensors:
                tensors[name] = numbers.new_empty((len(blocks), *numbers.shape[1:]))
            tensors[name][start : start + step] = numbers
    return replace(part, **cast(Any, tensors))


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, [N, blocks]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].contiguous()


def _pairs(codes: Tensor) -> Tensor:
    """Codes of 4 bits [N, ..., K], in order -> [N, K / 2]."""
    flat = codes.flatten(1)
    return flat[:, 0::2] | flat[:, 1::2] << 4


def _low_then_high(packed: Tensor, run: int) -> Tensor:
    """Bytes [N, blocks, B] whose low halves are `run` codes and their high halves the next -> [N, K / 2]."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return _pairs(torch.cat([(runs & 15)[..., None, :], (runs >> 4)[..., None, :]], dim=-2))


def _crumbs(packed: Tensor) -> Tensor:
    """Bytes [N, blocks, B] whose lowest two bits are 32 codes, the next bits the next 32 -> codes [N, K]."""
    runs = packed.reshape(*packed.shape[:-1], -1, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (runs & 3).flatten(1)


def _four_or_five(has_offsets: bool, is_five: bool) -> Callable[[Tensor, int], Grouped]:
    head = 4 if has_offsets else 2

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        codes_at = head + (4 if is_five else 0)
        return Grouped(
            kind="int5" if is_five else "int4",
            num_inputs=num_inputs,
            group=32,
            values=_low_then_high(blocks[..., codes_at:], 16),
            high=blocks[..., head:codes_at].flatten(1).contiguous() if is_five else None,
            scales=_halves(blocks, 0),
            offsets=_halves(blocks, 2) if has_offsets else None,
            zero=0 if has_offsets else 16 if is_five else 8,
        )

    return read


def _indices(kind: CodeKind, at: int) -> Callable[[Tensor, int], Grouped]:
    """IQ4_NL and MXFP4: sixteen bytes after the scale, a float16 or a power of two of `at` bytes."""

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        scales = _halves(blocks, 0) if at == 2 else blocks[..., 0].contiguous().view(torch.float8_e8m0fnu)
        return Grouped(kind, num_inputs, 32, _low_then_high(blocks[..., at:], 16), scales)

    return read


def _indices_of_units(blocks: Tensor, num_inputs: int) -> Grouped:
    """IQ4_XS: eight groups of 32 with scales of 6 bits."""
    low = blocks[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    return Grouped(
        kind="iq4",
        num_inputs=num_inputs,
        group=32,
        values=_low_then_high(blocks[..., 8:], 16),
        scales=_less_32(low.flatten(1) | high.flatten(1) << 4),
        scale_units=_halves(blocks, 0),
    )


def _less_32(scales: Tensor) -> Tensor:
    """Six bits as int8, contiguous."""
    return (scales.to(torch.int8) - 32).contiguous()


def _ternary(at: int, codes: Callable[[Tensor], Tensor]) -> Callable[[Tensor, int], Grouped]:
    """TQ1_0 and TQ2_0: codes of -1, 0 and 1 before one scale, a float16 at a byte."""

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        return Grouped("int2", num_inputs, 256, pack(codes(blocks[..., :at]), 2), _halves(blocks, at), zero=1)

    return read


def _fives(packed: Tensor) -> Tensor:
    """TQ1_0: bytes [N, blocks, 52], each a fraction of 256 whose digits to the base of 3 are codes -> [N, K]."""
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8)[:, None]
    runs = ((packed[..., :32], 5), (packed[..., 32:48], 5), (packed[..., 48:52], 4))
    digits = torch.cat([(run[..., None, :] * powers[:count]).flatten(2) for run, count in runs], dim=-1)
    return (digits.int() * 3 >> 8).to(torch.uint8).flatten(1)


def _two(blocks: Tensor, num_inputs: int) -> Grouped:
    """Q2_K: sixteen groups of 16 with scales and offsets of 4 bits."""
    return Grouped(
        kind="int2",
        num_inputs=num_inputs,
        group=16,
        values=pack(_crumbs(blocks[..., 16:80]), 2),
        scales=(blocks[..., :16] & 15).flatten(1),
        scale_units=_halves(blocks, 80),
        offsets=(blocks[..., :16] >> 4).flatten(1),
        offset_units=-_halves(blocks, 82),
    )


def _three(blocks: Tensor, num_inputs: int) -> Grouped:
    """Q3_K: sixteen groups of 16 with scales of 6 bits."""
    low = blocks[..., None, 96:104] >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = blocks[..., None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    return Grouped(
        kind="int3",
        num_inputs=num_inputs,
        group=16,
        values=pack(_crumbs(blocks[..., 32:96]), 2),
        high=_plane(blocks[..., :32]),
        scales=_less_32(low.flatten(1) | high.flatten(1) << 4),
        scale_units=_halves(blocks, 108),
        zero=4,
    )


def _eight(blocks: Tensor, num_inputs: int) -> Grouped:
    values = blocks[..., 2:].flatten(1).contiguous().view(torch.int8)
    return Grouped("int8", num_inputs, 32, values, _halves(blocks, 0))


def _of_units(is_five: bool) -> Callable[[Tensor, int], Grouped]:
    """Q4_K and Q5_K: eight groups of 32 with scales and offsets of 6 bits."""

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        scales, offsets = _six_bit_pairs(blocks[..., 4:16])
        codes_at = 48 if is_five else 16
        return Grouped(
            kind="int5" if is_five else "int4",
            num_inputs=num_inputs,
            group=32,
            values=_low_then_high(blocks[..., codes_at:], 32),
            high=_plane(blocks[..., 16:48]) if is_five else None,
            scales=scales,
            scale_units=_halves(blocks, 0),
            offsets=offsets,
            offset_units=-_halves(blocks, 2),
        )

    return read


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes [N, blocks, 12] -> scales and offsets, uint8 [N, groups]."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    offsets = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    return scales.flatten(1), offsets.flatten(1)


def _six(blocks: Tensor, num_inputs: int) -> Grouped:
    """Q6_K: in each half of a block four runs of 32, sixteen groups of 16."""
    low = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64)
    high = (
        blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32)
        >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
        & 3
    )
    fours = high.flatten(1).reshape(len(blocks), -1, 4)
    return Grouped(
        kind="int6",
        num_inputs=num_inputs,
        group=16,
        values=_pairs(torch.cat([low & 15, low >> 4], dim=-1)),
        high=fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6,
        scales=blocks[..., 192:208].flatten(1).contiguous().view(torch.int8),
        scale_units=_halves(blocks, 208),
        zero=32,
    )


def _plane(packed: Tensor) -> Tensor:
    """Bytes [N, blocks, 32], of which bit g of byte i belongs to input 32 g + i -> [N, K / 8], in order."""
    bits = packed[..., None].transpose(-1, -2) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    return pack(bits.flatten(1), 1)


_READERS: dict[str, tuple[int, Callable[[Tensor, int], Grouped]]] = {
    "Q4_0": (18, _four_or_five(has_offsets=False, is_five=False)),
    "Q4_1": (20, _four_or_five(has_offsets=True, is_five=False)),
    "Q5_0": (22, _four_or_five(has_offsets=False, is_five=True)),
    "Q5_1": (24, _four_or_five(has_offsets=True, is_five=True)),
    "Q8_0": (34, _eight),
    "Q4_K": (144, _of_units(is_five=False)),
    "Q5_K": (176, _of_units(is_five=True)),
    "Q6_K": (210, _six),
    "Q2_K": (84, _two),
    "Q3_K": (110, _three),
    "IQ4_NL": (18, _indices("iq4", 2)),
    "IQ4_XS": (136, _indices_of_units),
    "MXFP4": (17, _indices("e2m1", 1)),
    "TQ1_0": (54, _ternary(52, _fives)),
    "TQ2_0": (66, _ternary(64, _crumbs)),
    **GRID_READERS,
}
"""By type: bytes of a block, and how a weight is read from blocks [N, number, bytes]."""

BLOCK_BYTES = {name: block_bytes for name, (block_bytes, _) in _READERS.items()}
"""Bytes of a block by type."""
GROUPED_TYPES = frozenset(_READERS)
"""The quantised types."""
