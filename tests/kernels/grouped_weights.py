"""Random weights of few bits, of every kind that a format may ask for."""

from typing import Any

import torch
from torch import Tensor

from betoken.kernels.linear_grouped.weight import CodeKind, Grouped

KINDS: tuple[CodeKind, ...] = ("int4", "int5", "int6", "int8", "float8")
SCALES = ("half", "bfloat", "float", "units", "signed units")
OFFSETS = ("none", "half", "units", "zeros", "signed zeros")
_FLOATS = {"half": torch.float16, "bfloat": torch.bfloat16, "float": torch.float32}
_HIGH_BITS = {"int5": 1, "int6": 2}
_ZERO = {"int4": 8, "int5": 16, "int6": 32}


def draw_weight(
    kind: CodeKind, shape: tuple[int, int], group: int, scales: str = "half", offsets: str = "none", seed: int = 0
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
    elif kind == "int8":
        given["values"] = integers(-128, 128, num_inputs).to(torch.int8)
    else:
        given["values"] = integers(0, 256, -(-num_inputs // 2)).to(torch.uint8)
        if kind in _HIGH_BITS:
            given["high"] = integers(0, 256, -(-num_inputs * _HIGH_BITS[kind] // 8)).to(torch.uint8)
        given["zero"] = 0 if offsets != "none" else _ZERO[kind]
    if scales in _FLOATS:
        given["scales"] = floats(num_groups).to(_FLOATS[scales])
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
    return Grouped(kind=kind, num_inputs=num_inputs, group=group, **given)
