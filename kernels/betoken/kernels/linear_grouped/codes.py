"""The numbers that low-bit codes represent, and their layout in bytes."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

_Integers = Literal["int2", "int3", "int4", "int5", "int6", "int8", "snorm8"]
_Indices = Literal["e2m1", "nf4", "fp4", "iq4", "iq3_xxs", "iq3_s", "iq2", "iq1"]
CodeKind = _Integers | Literal["float8"] | _Indices

VALUE_BITS: Mapping[CodeKind, int] = {
    **{"int2": 2, "int3": 2, "int4": 4, "int5": 4, "int6": 4},
    **{"e2m1": 4, "nf4": 4, "fp4": 4, "iq4": 4, "iq3_xxs": 4, "iq3_s": 4, "iq2": 2, "iq1": 2},
}
"""Bits of a code that are stored in `Grouped.values`, for kinds of less than a byte."""
HIGH_BITS: Mapping[CodeKind, int] = {"int3": 1, "int5": 1, "int6": 2, "iq2": 1, "iq1": 1}
"""Bits of a code that are stored in `Grouped.high`."""
BYTE_DTYPES: Mapping[CodeKind, torch.dtype] = {
    "int8": torch.int8,
    "snorm8": torch.int8,
    "float8": torch.float8_e4m3fn,
}
_POSITIVE_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_POSITIVE_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
_POSITIVE_IQ3_XXS = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.5)
_POSITIVE_IQ3_S = (1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0)
_POSITIVE_IQ2 = (1.0, 3.125, 5.375, 0.0)
TABLES: Mapping[CodeKind, tuple[float, ...]] = {
    "e2m1": (*_POSITIVE_E2M1, *(-number for number in _POSITIVE_E2M1)),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (*_POSITIVE_FP4, *(-number for number in _POSITIVE_FP4)),
    "iq4": (*(-127, -104, -83, -65, -49, -35, -22, -10), *(1, 13, 25, 38, 53, 69, 89, 113)),
    "iq3_xxs": (*_POSITIVE_IQ3_XXS, *(-number for number in _POSITIVE_IQ3_XXS)),
    "iq3_s": (*_POSITIVE_IQ3_S, *(-number for number in _POSITIVE_IQ3_S)),
    "iq2": (*_POSITIVE_IQ2, *(-number for number in _POSITIVE_IQ2)),
    "iq1": (-1.125, -0.125, 0.875, 0.0, -0.875, 0.125, 1.125, 0.0),
}
"""Numbers of the codes that are table indices: sixteen, or eight for codes of 3 bits.

Source: Open Compute Project, Microscaling Formats v1.0; bitsandbytes, functional.py (`get_4bit_type`); ggml's
ggml-common.h (`kvalues_iq4nl`, and the levels of its grids times the constant factor of their scales).
"""
INEXACT: tuple[CodeKind, ...] = ("nf4", "fp4")
"""Kinds whose numbers no half type represents."""
FACTORS: Mapping[CodeKind, float] = {"snorm8": 1 / 127}
"""Factor of every number, applied after its scale."""


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [N, ceil(width * bits / 8)] -> uint8 [N, width], lowest bits first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :width]


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [N, K], each below 2^bits -> uint8 [N, ceil(K * bits / 8)], lowest bits first."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte))
    parts = padded.reshape(len(codes), -1, per_byte)
    packed: Tensor = parts[..., 0]
    for place in range(1, per_byte):
        packed = packed | parts[..., place] << bits * place
    return packed.contiguous()
