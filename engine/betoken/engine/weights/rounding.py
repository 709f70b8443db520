"""Dense linear layers rounded to integers of 4 or 8 bits as they are loaded: to the nearest, by groups of inputs.

Embeddings, the output layer and experts of mixtures stay dense. It knows no files.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import is_plain
from betoken.engine.weights.stored import Stored, StoredWeight
from betoken.engine.weights.tensor_files import StoredTensor
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import pack

GROUPS: Mapping[Literal["int8", "int4"], int] = {"int8": 128, "int4": 32}
"""Inputs that share a scale."""


def plan_rounding(kind: Literal["int8", "int4"], files: Mapping[str, StoredTensor], model: Any) -> dict[str, Stored]:
    """As loading asks for it (`stored.Plan`): weights of these files are read one by one, those under other names are
    rounded after the loader has brought them."""
    found: dict[str, Stored] = {}
    head = model.get_output_embeddings()
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, Conv1D)) and layer is not head and is_plain(layer):
            weight, key = layer.weight, f"{path}.weight"
            stored = StoredWeight(
                {"weight": (tuple(weight.shape), weight.dtype)}, partial(_read, kind, path, isinstance(layer, Conv1D))
            )
            if key in files and files[key].shape == tuple(weight.shape):
                stored = replace(stored, fetch=partial(_fetch, files[key], model.dtype), keys=(key,))
            found[path] = stored
    return found


def _fetch(tensor: StoredTensor, dtype: torch.dtype, name: str) -> Tensor:
    """In the model's type, which is rounded first."""
    return tensor.read().to(dtype)


def _read(kind: Literal["int8", "int4"], path: str, is_transposed: bool, given: Mapping[str, Tensor]) -> Grouped:
    weight = given["weight"]
    if not weight.is_floating_point() or not bool(weight.isfinite().all()):
        raise ModelRefusedError(f"quantize: {path}.weight holds a value that is not finite")
    return rounded(kind, weight.T if is_transposed else weight)


def rounded(kind: Literal["int8", "int4"], weight: Tensor, group: int | None = None) -> Grouped:
    """A weight [N, K] float as codes of -127 to 127 or -7 to 7; the scales are rounded to bfloat16 first."""
    group, largest = group or GROUPS[kind], 127 if kind == "int8" else 7
    num_outputs, num_inputs = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -num_inputs % group)).reshape(num_outputs, -1, group)
    scales = (padded.abs().amax(2) / largest).bfloat16()
    divisors = torch.where(scales == 0, 1.0, scales.float())[..., None]
    codes = (padded / divisors).round().clamp(-largest, largest).to(torch.int8).flatten(1)[:, :num_inputs]
    if kind == "int8":
        return Grouped("int8", num_inputs, group, codes.contiguous(), scales)
    return Grouped("int4", num_inputs, group, pack((codes + 8).view(torch.uint8), 4), scales, zero=8)
