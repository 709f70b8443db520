"""Weights of FP8 (E4M3) with a scale for a tensor, an output or a block, kept in their bytes; checkpoints of "fp8".

A scale multiplies, whatever its name says. It reads tensors, not files.
Source: transformers, integrations/finegrained_fp8.py; compressed-tensors, compressors/naive_quantized.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import FLOATS, StoredTensors, check_group
from betoken.kernels.linear_grouped import Grouped

METHOD = "fp8"
_SCALES = ("weight_scale_inv", "weight_scale")
_IGNORED = ("input_scale", "activation_scale")


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    if config.get("fmt", "e4m3") != "e4m3":
        raise ModelRefusedError(f"{METHOD}: fmt = {config['fmt']!r} is not 'e4m3'")
    block = config.get("weight_block_size")
    is_pair = isinstance(block, Sequence) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    if block is not None and not is_pair:
        raise ModelRefusedError(f"{METHOD}: weight_block_size = {block!r} is not a pair of sizes")


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """Storage of a layer's weight; None if it is dense.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    if tensors.specs.get("weight", ((), ""))[1] != "F8_E4M3":
        return None
    name = next((name for name in _SCALES if name in tensors.specs), _SCALES[0])
    block = config.get("weight_block_size")
    blocks = [] if block is None else [block]
    taken = take_float8(tensors, name, blocks)
    for ignored in _IGNORED:  # constants of activations, which stay as they are
        if ignored in tensors.specs:
            taken[ignored] = tensors.take(ignored, [tensors.specs[ignored][0]], *FLOATS)
    return StoredWeight(taken, partial(float8_weight, tensors, name, blocks))


def _blocks_by_scales(tensors: StoredTensors, blocks: list[Any]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Outputs and inputs of a block by the shape of all scales."""
    num_outputs, num_inputs = tensors.num_outputs, tensors.num_inputs
    whole = check_group(tensors.method, "group", -1, num_inputs)
    found: dict[tuple[int, ...], tuple[int, int]] = {(): (num_outputs, whole), (1,): (num_outputs, whole)}
    if not blocks:
        found |= {(1, 1): (num_outputs, whole), (num_outputs,): (1, whole), (num_outputs, 1): (1, whole)}
    for height, width in blocks:
        check_group(tensors.method, "the blocks' width", width, num_inputs)
        found[-(-num_outputs // height), -(-num_inputs // width)] = (height, width)
    return found


def take_float8(tensors: StoredTensors, scales: str, blocks: list[Any]) -> dict[str, Any]:
    """Tensors of a weight whose scales carry this name; `blocks` are pairs of outputs and inputs.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    shape = (tensors.num_outputs, tensors.num_inputs)
    return {
        "weight": tensors.take("weight", [shape], torch.float8_e4m3fn),
        scales: tensors.take(scales, list(_blocks_by_scales(tensors, blocks)), *FLOATS),
    }


def float8_weight(tensors: StoredTensors, name: str, blocks: list[Any], given: Mapping[str, Tensor]) -> Grouped:
    """The weight of loaded tensors; a block's scale is repeated for each of its outputs.

    Raises:
        ModelRefusedError: a number or a scale is not finite.
    """
    values, scales = given["weight"], given[name]
    if bool((values.view(torch.uint8) & 127 == 127).any()):
        raise tensors.refuse("weight", "holds NaN")
    height, group = _blocks_by_scales(tensors, blocks)[tuple(scales.shape)]
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    scales = scales.repeat_interleave(height, dim=0)[: tensors.num_outputs].contiguous()
    return tensors.grouped(kind="float8", group=group, values=values, scales=scales)
