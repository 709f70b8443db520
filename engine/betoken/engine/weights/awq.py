"""Weights that AWQ wrote for its `gemm` kernel. It reads tensors, not files.

Source: AutoAWQ, awq/modules/linear/gemm.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import FLOATS, StoredTensors, check_group, integer_weight, unpack
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import pack

METHOD = "awq"
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of the eight columns in a word, in order."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    if config.get("bits") != 4:
        raise ModelRefusedError(f"{METHOD}: bits = {config.get('bits')!r} is not 4")
    for field in ("version", "format", "checkpoint_format"):
        if config.get(field, "gemm") not in ("gemm", "GEMM"):
            raise ModelRefusedError(f"{METHOD}: {field} = {config[field]!r} is not 'gemm'")


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """How a layer's weight is stored; None for a dense layer.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    if "qweight" not in tensors.specs:
        return None
    num_outputs, num_inputs = tensors.num_outputs, tensors.num_inputs
    group = check_group(METHOD, "group_size", config.get("group_size", -1), num_inputs)
    num_groups = -(-num_inputs // group)
    if num_outputs % 8:
        raise tensors.refuse("qweight", f"{num_outputs} outputs, not a multiple of 8")
    taken = {
        "qweight": tensors.take("qweight", [(num_inputs, num_outputs // 8)], torch.int32),
        "qzeros": tensors.take("qzeros", [(num_groups, num_outputs // 8)], torch.int32),
        "scales": tensors.take("scales", [(num_groups, num_outputs)], *FLOATS),
    }
    return StoredWeight(taken, partial(_read, tensors, group))


def _read(tensors: StoredTensors, group: int, given: Mapping[str, Tensor]) -> Grouped:
    codes = pack(_columns(given["qweight"]).T, 4)
    return integer_weight(tensors, 4, codes, given["scales"].T, _columns(given["qzeros"]).T.int(), group)


def _columns(packed: Tensor) -> Tensor:
    """int32 [R, N / 8] -> uint8 [R, N] in the columns' order."""
    nibbles = unpack(packed, 4, packed.shape[1] * 8).to(torch.uint8)
    return nibbles.reshape(len(packed), -1, 8)[..., _NIBBLES].flatten(1)
