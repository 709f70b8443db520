"""Weights that compressed-tensors wrote: integers of 4 and 8 bits, packed or not, FP8, NVFP4 and MXFP4.

Activations and KV are never quantised, whatever the file says of them. It reads tensors, not files.
Source: compressed-tensors, compressors/{pack_quantized,naive_quantized}.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.float4 import Names, take_float4
from betoken.engine.weights.float8 import float8_weight, take_float8
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import FLOATS, StoredTensors, check_group, integer_weight, order_of, unpack
from betoken.kernels.linear_grouped import Grouped

METHOD = "compressed-tensors"
_STRATEGIES: Mapping[str, tuple[str | None, ...]] = {
    "mxfp4-pack-quantized": ("group",),
    "nvfp4-pack-quantized": ("tensor_group",),
}
"""Strategies of the formats of E2M1 floats; integers and FP8 have others."""
_FORMATS = (
    *("dense", "float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized"),
    *_STRATEGIES,
)
_FLOAT4 = Names("weight_packed", "weight_scale", "weight_global_scale", divides=True)
_IGNORED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("input_scale", "input_global_scale", "output_scale"), FLOATS),
    "input_zero_point": (torch.int8,),
}
"""Constants of activations."""
_ORDERS = (None, False, "weight", "static", "group", "dynamic")
"""Orders of inputs; the last two by groups that `weight_g_idx` names."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelRefusedError(f"{METHOD}: config_groups = {groups!r} names no group")
    _one_of("format", config.get("format"), (*_FORMATS, None))
    _one_of("sparsity_config.format", (config.get("sparsity_config") or {}).get("format"), ("dense", None))
    if config.get("transform_config"):
        raise ModelRefusedError(f"{METHOD}: transform_config is not empty: rotated weights are not supported")
    for name, group in groups.items():
        weights, form = group.get("weights") or {}, str(group.get("format") or config.get("format"))
        _one_of(f"{name}.format", group.get("format"), (*_FORMATS, None))
        _one_of(f"{name}.weights.type", weights.get("type", "int"), ("int", "float"))
        bits = (4,) if form in _STRATEGIES else (8,) if _is_float(weights) else (4, 8)
        _one_of(f"{name}.weights.num_bits", weights.get("num_bits", 8), bits)
        strategies = _STRATEGIES.get(form, ("tensor", "channel", "group", "block", None))
        _one_of(f"{name}.weights.strategy", weights.get("strategy"), strategies)
        _one_of(f"{name}.weights.actorder", weights.get("actorder"), _ORDERS)


def _is_float(weights: Mapping[str, Any]) -> bool:
    return weights.get("type") == "float"


def _one_of(field: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        names = ", ".join(repr(one) for one in known if one is not None)
        raise ModelRefusedError(f"{METHOD}: {field} = {value!r} is none of {names}")


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """Storage of a layer's weight; None if it is dense.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    ignored = {
        name: tensors.take(name, [tensors.specs[name][0]], *dtypes)
        for name, dtypes in _IGNORED.items()
        if name in tensors.specs
    }
    if tensors.specs.get("weight_packed", ((), ""))[1] == "U8":
        weight = take_float4(tensors, _FLOAT4)
        return replace(weight, tensors={**weight.tensors, **ignored})
    if "weight_packed" in tensors.specs:
        return _integers(config, tensors, _packed_bits(tensors), ignored)
    dtype = tensors.specs.get("weight", ((), ""))[1]
    if dtype == "I8":
        return _integers(config, tensors, None, ignored)
    if dtype == "F8_E4M3":
        blocks = [weights["block_structure"] for weights in _weights(config) if weights.get("block_structure")]
        taken = take_float8(tensors, "weight_scale", blocks)
        return StoredWeight(taken | ignored, partial(float8_weight, tensors, "weight_scale", blocks))
    return None


def _weights(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [group.get("weights") or {} for group in config["config_groups"].values()]


def _packed_bits(tensors: StoredTensors) -> int:
    shapes = {bits: (tensors.num_outputs, -(-tensors.num_inputs * bits // 32)) for bits in (4, 8)}
    found, _ = tensors.take("weight_packed", list(shapes.values()), torch.int32)
    return next(bits for bits, shape in shapes.items() if shape == found)


def _integers(
    config: Mapping[str, Any], tensors: StoredTensors, packed_bits: int | None, ignored: Mapping[str, Any]
) -> StoredWeight:
    num_outputs, num_inputs = tensors.num_outputs, tensors.num_inputs
    bits = packed_bits or 8
    sizes = {
        check_group(METHOD, "group_size", weights.get("group_size"), num_inputs)
        for weights in _weights(config)
        if not _is_float(weights) and weights.get("num_bits", 8) == bits
    }
    by_scales: dict[tuple[int, ...], int] = {(num_outputs, -(-num_inputs // size)): size for size in sizes}
    whole = -(-num_inputs // 32) * 32
    shapes = [*by_scales, (1,), ()] if whole in sizes else [*by_scales]
    if not shapes:
        raise tensors.refuse("weight_packed" if packed_bits else "weight", f"no group has {bits} bits")
    taken = dict(ignored) | {"weight_scale": tensors.take("weight_scale", shapes, *FLOATS)}
    scales = taken["weight_scale"][0]
    group = by_scales.get(scales, whole)
    if packed_bits:
        taken["weight_packed"] = tensors.take("weight_packed", [tensors.specs["weight_packed"][0]], torch.int32)
        taken["weight_shape"] = tensors.take("weight_shape", [(2,)], torch.int64, torch.int32)
    else:
        taken["weight"] = tensors.take("weight", [(num_outputs, num_inputs)], torch.int8)
    if "weight_g_idx" in tensors.specs:
        taken["weight_g_idx"] = tensors.take("weight_g_idx", [(num_inputs,)], torch.int32, torch.int64)
    if "weight_zero_point" in tensors.specs:
        if packed_bits:
            zeros_shape: tuple[int, ...] = (-(-num_outputs * bits // 32), *scales[1:])
            taken["weight_zero_point"] = tensors.take("weight_zero_point", [zeros_shape], torch.int32)
        else:
            taken["weight_zero_point"] = tensors.take("weight_zero_point", [scales], torch.int8)
    elif not any(weights.get("symmetric", True) for weights in _weights(config)):
        raise tensors.refuse("weight_zero_point", "is not in the checkpoint, though symmetric is false")
    return StoredWeight(taken, partial(_read_integers, tensors, bits, group))


def _read_integers(tensors: StoredTensors, bits: int, group: int, given: Mapping[str, Tensor]) -> Grouped:
    shape = [tensors.num_outputs, tensors.num_inputs]
    scales = given["weight_scale"]
    scales = scales.expand(shape[0], 1) if scales.dim() < 2 else scales
    zeros = given.get("weight_zero_point")
    order = order_of(tensors, "weight_g_idx", given.get("weight_g_idx"), group)
    if "weight" in given:
        codes = given["weight"].view(torch.uint8) ^ 128
        zeros = None if zeros is None else (zeros.int() + 128).expand(scales.shape)
        return integer_weight(tensors, 8, codes, scales, zeros, group, order)
    if (named := given["weight_shape"].tolist()) != shape:
        raise tensors.refuse("weight_shape", f"{named}, not {shape}")
    if zeros is not None:
        zeros = unpack(zeros.reshape(-1, scales.shape[1]).T, bits, shape[0]).T
    return integer_weight(tensors, bits, given["weight_packed"].view(torch.uint8), scales, zeros, group, order)
