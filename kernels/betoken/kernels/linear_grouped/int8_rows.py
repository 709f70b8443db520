"""Rows of activations rounded to int8 in blocks, for integer products with weights of few bits.

The CPU kernels multiply codes by codes (int8_linear.h); this module defines the numbers that the codes stand for.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from betoken.kernels.linear_grouped.codes import CodeKind

BLOCK_INPUTS = 32
"""Inputs that share a scale."""
INT8_KINDS: tuple[CodeKind, ...] = ("int2", "int3", "int4", "int5", "int6", "int8", "snorm8")
"""Kinds of weight codes that have integer products."""
SMALLEST = 2.0**-100
"""A block whose largest input is smaller has the codes and the scale 0."""


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of rows: x is about code * scale.

    A scale is the largest input of its block over 127; codes are rounded to the nearest integer, halves to even.

    Args:
        x: [R, K], any float type; the last block is filled up with zeros.

    Returns:
        Codes int8 [R, ceil(K / 32), 32], and scales float32 [R, ceil(K / 32)], not finite if an input is not finite.
    """
    blocks = pad(x.float(), (0, -x.shape[1] % BLOCK_INPUTS)).reshape(x.shape[0], -1, BLOCK_INPUTS)
    largest = blocks.abs().amax(dim=2)
    is_zero = largest < SMALLEST
    most = torch.full_like(largest, 127)  # a number divided by a tensor would be rounded twice
    inverse = torch.where(is_zero, 0.0, most / largest)
    codes = (blocks * inverse[..., None]).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return codes, torch.where(is_zero, 0.0, largest / most)


def rounded(x: Tensor) -> Tensor:
    """Return the numbers that the codes of `round_rows` stand for, float32 [R, K]."""
    codes, scales = round_rows(x)
    return (codes.float() * scales[..., None]).flatten(1)[:, : x.shape[1]].contiguous()
