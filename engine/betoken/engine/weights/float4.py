"""Weights of E2M1 floats, two in a byte, whose groups share a small scale: NVFP4 and MXFP4.

NVFP4 has groups of 16 with FP8 scales and one float32 for the tensor. They are combined into a float32 for each group.
MXFP4 has groups of 32 with powers of two. It reads tensors, not files.
Source: compressed-tensors, compressors/{nvfp4,mxfp4}; Open Compute Project, Microscaling Formats v1.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import StoredTensors
from betoken.kernels.linear_grouped import Grouped


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a weight's tensors."""

    values: str
    scales: str
    total: str
    """Scale of the whole tensor, which MXFP4 lacks."""
    divides: bool
    """Whether the groups' scales are divided by it, instead of multiplied."""


def take_float4(tensors: StoredTensors, names: Names) -> StoredWeight:
    """Storage of a weight: MXFP4 if its scales are bytes, NVFP4 otherwise.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    is_mx = tensors.specs.get(names.scales, ((), ""))[1] == "U8"
    group, num_outputs, num_inputs = 32 if is_mx else 16, tensors.num_outputs, tensors.num_inputs
    if num_inputs % group:
        raise tensors.refuse(names.values, f"{num_inputs} inputs, not a multiple of {group}")
    scale_type = torch.uint8 if is_mx else torch.float8_e4m3fn
    taken: dict[str, Any] = {
        names.values: tensors.take(names.values, [(num_outputs, num_inputs // 2)], torch.uint8),
        names.scales: tensors.take(names.scales, [(num_outputs, num_inputs // group)], scale_type),
    }
    if not is_mx:
        taken[names.total] = tensors.take(names.total, [(), (1,)], torch.float32)
    return StoredWeight(taken, partial(_read, tensors, names, group))


def _read(tensors: StoredTensors, names: Names, group: int, given: Mapping[str, Tensor]) -> Grouped:
    scales = given[names.scales]
    if names.total in given:
        scales, total = scales.float(), given[names.total]
        scales = scales / total if names.divides else scales * total
    else:
        scales = scales.view(torch.float8_e8m0fnu)
    return tensors.grouped(kind="e2m1", group=group, values=given[names.values], scales=scales)
