"""Random weights of few bits, of every kind that a format may ask for."""

from typing import Any

import torch
from torch import Tensor

from betoken.kernels.linear_grouped.codes import HIGH_BITS, VALUE_BITS, CodeKind
from betoken.kernels.linear_grouped.weight import Grouped

KINDS: tuple[CodeKind, ...] = (
    *("int2", "int3", "int4", "int5", "int6", "int8", "snorm8", "float8", "e2m1", "nf4", "fp4"),
    *("iq4", "iq3_xxs", "iq3_s", "iq2", "iq1"),
)
SCALES = ("half", "bfloat", "float", "powers", "units", "signed units")
OFFSETS = ("none", "half", "units", "zeros", "signed zeros")
_FLOATS = {"half": torch.float16, "bfloat": torch.bfloat16, "float": torch.float32}
_ZERO = {"int2": 2, "int3": 4, "int4": 8, "int5": 16, "int6": 32}


WAYS = [
    ("half", "none"),
    ("half", "half"),
    ("bfloat", "zeros"),
    ("bfloat", "signed zeros"),
    ("float", "none"),
    ("powers", "none"),
    ("units", "units"),
    ("units", "none"),
    ("signed units", "none"),
]
"""Kinds of scale and offset that formats have together."""
_SCALES_OF_GRIDS = ("half", "units", "signed units")
_KINDS_WITH: dict[str, tuple[CodeKind, ...]] = {
    "half": ("int2", "int4", "int5"),
    "units": ("int2", "int4", "int5"),
    "zeros": ("int2", "int3", "int4", "int5", "int6", "int8"),
    "signed zeros": ("int8",),
}


def cases(shapes: list[tuple[tuple[int, int], int]]) -> list[tuple[CodeKind, tuple[int, int], int, str, str]]:
    """Kind, shape, group, scales, offsets: units with short groups, offsets with codes of few bits."""
    return [
        (kind, shape, group, scales, offsets)
        for kind in KINDS
        for shape, group in shapes
        for scales, offsets in WAYS
        if ("units" not in scales or group <= 32)
        and kind in _KINDS_WITH.get(offsets, KINDS)
        and (scales in _SCALES_OF_GRIDS if kind.startswith("iq") else (scales, offsets) != ("units", "none"))
    ]


def draw_weight(
    kind: CodeKind,
    shape: tuple[int, int],
    group: int,
    scales: str = "half",
    offsets: str = "none",
    seed: int = 0,
    is_ordered: bool = False,
) -> Grouped:
    """A weight [N, K] whose codes, scales and offsets are all drawn."""
    generator = torch.Generator().manual_seed(seed)
    num_outputs, num_inputs = shape
    num_groups, num_units = -(-num_inputs // group), -(-num_inputs // 256)

    def integers(lowest: int, end: int, width: int) -> Tensor:
        return torch.randint(lowest, end, (num_outputs, width), generator=generator)

    def floats(width: int) -> Tensor:
        return torch.randn(num_outputs, width, generator=generator) / 8

    given: dict[str, Any] = {}
    if kind == "float8":
        values = (torch.randn(shape, generator=generator) * 50).clamp(-448, 448)
        values[:, ::3] /= 1e4  # subnormal ones too
        given["values"] = values.to(torch.float8_e4m3fn)
    elif kind in ("int8", "snorm8"):
        given["values"] = integers(-128, 128, num_inputs).to(torch.int8)
    else:
        given["values"] = integers(0, 256, -(-num_inputs * VALUE_BITS[kind] // 8)).to(torch.uint8)
        if kind in HIGH_BITS:
            given["high"] = integers(0, 256, -(-num_inputs * HIGH_BITS[kind] // 8)).to(torch.uint8)
        given["zero"] = 0 if offsets != "none" else _ZERO.get(kind, 0)
    if scales in _FLOATS:
        given["scales"] = floats(num_groups).to(_FLOATS[scales])
    elif scales == "powers":
        given["scales"] = integers(118, 128, num_groups).to(torch.uint8).view(torch.float8_e8m0fnu)
    else:
        is_signed = scales == "signed units"
        given["scales"] = integers(-128 if is_signed else 0, 128, num_groups).to(
            torch.int8 if is_signed else torch.uint8
        )
        given["scale_units"] = (floats(num_units) / 64).half()
    if offsets == "zeros":
        given["zeros"] = integers(0, 16, num_groups).to(torch.uint8)
    elif offsets == "signed zeros":
        given["zeros"] = integers(-128, 128, num_groups).to(torch.int8)
    elif offsets == "units":
        given |= {
            "offsets": integers(0, 64, num_groups).to(torch.uint8),
            "offset_units": (floats(num_units) / 64).half(),
        }
    elif offsets == "half":
        given["offsets"] = floats(num_groups).half()
    if is_ordered:
        given["order"] = torch.randperm(num_inputs, generator=generator).int()
    return Grouped(kind=kind, num_inputs=num_inputs, group=group, **given)
