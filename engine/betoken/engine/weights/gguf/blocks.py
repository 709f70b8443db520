"""The blocks of GGUF tensors as grouped weights: bits are moved, no number is changed.

Source: ggml's ggml-quants.c (`dequantize_row_*`). It knows blocks, not files or models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.kernels.linear_grouped import Grouped


def read_blocks(type_name: str, blocks: Tensor, num_inputs: int, name: str) -> Grouped:
    """The weight of a tensor's bytes, uint8 [N, bytes of K inputs]; `name` is used in errors.

    Raises:
        ModelRefusedError: a scale or an offset is not finite.
    """
    block_bytes, read = _READERS[type_name]
    weight = read(blocks.reshape(blocks.shape[0], -1, block_bytes), num_inputs)
    for field in ("scales", "scale_units", "offsets", "offset_units"):
        numbers = getattr(weight, field)
        if numbers is not None and numbers.is_floating_point() and not bool(numbers.isfinite().all()):
            raise ModelRefusedError(f"tensor {name!r}, {type_name}: {field} that are not finite")
    return weight


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


def _eight(blocks: Tensor, num_inputs: int) -> Grouped:
    values = blocks[..., 2:].flatten(1).contiguous().view(torch.int8)
    return Grouped("int8", num_inputs, 32, values, _halves(blocks, 0))


def _of_units(is_five: bool) -> Callable[[Tensor, int], Grouped]:
    """Q4_K and Q5_K: eight groups of 32 with scales and offsets of 6 bits."""

    def read(blocks: Tensor, num_inputs: int) -> Grouped:
        scales, offsets = _six_bit_pairs(blocks[..., 4:16])
        codes_at = 48 if is_five else 16
        high = None
        if is_five:
            bits = blocks[..., 16:48, None].transpose(-1, -2) >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
            high = _bits(bits.flatten(1))  # bit g of byte i belongs to input 32 g + i
        return Grouped(
            kind="int5" if is_five else "int4",
            num_inputs=num_inputs,
            group=32,
            values=_low_then_high(blocks[..., codes_at:], 32),
            high=high,
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


def _bits(bits: Tensor) -> Tensor:
    """[N, K] of 0 and 1 -> [N, K / 8], the first in the lowest bit."""
    eights = bits.reshape(len(bits), -1, 8) << torch.arange(8, dtype=torch.uint8)
    return eights.sum(-1, dtype=torch.uint8)


_READERS: dict[str, tuple[int, Callable[[Tensor, int], Grouped]]] = {
    "Q4_0": (18, _four_or_five(has_offsets=False, is_five=False)),
    "Q4_1": (20, _four_or_five(has_offsets=True, is_five=False)),
    "Q5_0": (22, _four_or_five(has_offsets=False, is_five=True)),
    "Q5_1": (24, _four_or_five(has_offsets=True, is_five=True)),
    "Q8_0": (34, _eight),
    "Q4_K": (144, _of_units(is_five=False)),
    "Q5_K": (176, _of_units(is_five=True)),
    "Q6_K": (210, _six),
}
"""By type: bytes of a block, and how a weight is read from blocks [N, number, bytes]."""

GROUPED_TYPES = frozenset(_READERS)
"""The types that stay in their bytes."""
