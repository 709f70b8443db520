"""Weights that NVIDIA's Model Optimizer exported: NVFP4, and FP8 with a scale for a tensor.

Activations and KV are never quantised, whatever the file says of them. It reads tensors, not files, except the settings
that earlier versions write next to config.json. Source: vLLM, model_executor/layers/quantization/modelopt.py.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.float4 import Names, take_float4
from betoken.engine.weights.float8 import float8_weight, take_float8
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import FLOATS, StoredTensors

METHOD = "modelopt"
_SETTINGS = "hf_quant_config.json"
_ALGORITHMS = ("FP8", "NVFP4")
_NAMES = Names("weight", "weight_scale", "weight_scale_2", divides=False)
_IGNORED = ("input_scale", "k_scale", "v_scale")
"""Scales of activations and KV."""


def read_settings(directory: Path) -> dict[str, Any] | None:
    """The settings that a directory's config.json leaves out; None if there are none.

    Raises:
        ModelRefusedError: they are not settings.
    """
    path = directory / _SETTINGS
    if not path.is_file():
        return None
    try:
        settings = {**json.loads(path.read_text(encoding="utf-8"))["quantization"], "quant_method": METHOD}
        return settings if settings.get("quant_algo") is not None else None
    except Exception as error:  # whatever its contents are taken for
        raise ModelRefusedError(f"{path} does not describe a quantization: {type(error).__name__}: {error}") from error


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    if (algorithm := config.get("quant_algo")) not in _ALGORITHMS:
        raise ModelRefusedError(f"{METHOD}: quant_algo = {algorithm!r} is none of {', '.join(_ALGORITHMS)}")


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """Storage of a layer's weight; None if it is dense.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    if "pre_quant_scale" in tensors.specs:
        raise tensors.refuse("pre_quant_scale", "scaled inputs (AWQ) are not supported")
    dtype = tensors.specs.get("weight", ((), ""))[1]
    if dtype == "U8":
        weight = take_float4(tensors, _NAMES)
    elif dtype == "F8_E4M3":
        taken = take_float8(tensors, _NAMES.scales, [])
        weight = StoredWeight(taken, partial(float8_weight, tensors, _NAMES.scales, []))
    else:
        return None
    ignored = {
        name: tensors.take(name, [tensors.specs[name][0]], *FLOATS) for name in _IGNORED if name in tensors.specs
    }
    return replace(weight, tensors={**weight.tensors, **ignored})
