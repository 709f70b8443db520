"""Weights that GPTQ wrote, versions 1 and 2, of 2, 4 and 8 bits. It reads tensors, not files.

Source: AutoGPTQ, qlinear_cuda_old.py; GPTQModel.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import FLOATS, StoredTensors, check_group, integer_weight, order_of, unpack
from betoken.kernels.linear_grouped import Grouped

METHOD = "gptq"
_ZERO_LESS = {None: 1, "gptq": 1, "gptq_v2": 0}
"""Offset of the stored zeros, by `checkpoint_format`."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    if config.get("bits") not in (2, 4, 8):
        raise ModelRefusedError(f"{METHOD}: bits = {config.get('bits')!r} is none of 2, 4, 8")
    if config.get("pack_dtype") not in (None, "int32"):
        raise ModelRefusedError(f"{METHOD}: pack_dtype = {config['pack_dtype']!r} is not 'int32'")
    if config.get("checkpoint_format") not in _ZERO_LESS:
        raise ModelRefusedError(
            f"{METHOD}: checkpoint_format = {config['checkpoint_format']!r} is none of 'gptq', 'gptq_v2'"
        )


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """Storage of a layer's weight; None if it is dense.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    if "qweight" not in tensors.specs:
        return None
    bits, num_outputs, num_inputs = config["bits"], tensors.num_outputs, tensors.num_inputs
    group = check_group(METHOD, "group_size", config.get("group_size", -1), num_inputs)
    num_groups = -(-num_inputs // group)
    taken = {
        "qweight": tensors.take("qweight", [(-(-num_inputs * bits // 32), num_outputs)], torch.int32),
        "qzeros": tensors.take("qzeros", [(num_groups, -(-num_outputs * bits // 32))], torch.int32),
        "scales": tensors.take("scales", [(num_groups, num_outputs)], *FLOATS),
    }
    if "g_idx" in tensors.specs:
        taken["g_idx"] = tensors.take("g_idx", [(num_inputs,)], torch.int32)
    elif config.get("desc_act"):
        raise tensors.refuse("g_idx", "is not in the checkpoint, though desc_act is true")
    less = _ZERO_LESS[config.get("checkpoint_format")]
    return StoredWeight(taken, partial(_read, tensors, bits, group, less))


def _read(tensors: StoredTensors, bits: int, group: int, less: int, given: Mapping[str, Tensor]) -> Grouped:
    order = order_of(tensors, "g_idx", given.get("g_idx"), group)
    codes = given["qweight"].T.contiguous().view(torch.uint8)
    zeros = unpack(given["qzeros"], bits, tensors.num_outputs).T + less
    return integer_weight(tensors, bits, codes, given["scales"].T, zeros, group, order)
