"""Weights that bitsandbytes wrote: nf4 and fp4, doubly quantised or not, and the int8 of LLM.int8().

Activations are never quantised. It reads tensors, not files.
Source: bitsandbytes, functional.py (`QuantState`, `int8_vectorwise_dequant`), nn/modules.py.
"""

import json
from collections.abc import Mapping
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.stored import StoredWeight
from betoken.engine.weights.stored_files import StoredTensors
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import TABLES, CodeKind

METHOD = "bitsandbytes"
_KINDS: tuple[CodeKind, ...] = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 1 << 16
_ROWS = 0
"""Value of `weight_format` for a row-major int8 weight."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raises:
    ModelRefusedError: with the field and its value.
    """
    if not config.get("load_in_4bit") and not config.get("load_in_8bit"):
        raise ModelRefusedError(f"{METHOD}: neither load_in_4bit nor load_in_8bit is true")
    for field, known in (("bnb_4bit_quant_type", _KINDS), ("bnb_4bit_quant_storage", ("uint8",))):
        if config.get("load_in_4bit") and config.get(field, known[0]) not in known:
            raise ModelRefusedError(f"{METHOD}: {field} = {config[field]!r} is none of {', '.join(known)}")


def stored_weight(config: Mapping[str, Any], tensors: StoredTensors) -> StoredWeight | None:
    """Storage of a layer's weight; None if it is dense.

    Raises:
        ModelRefusedError: a tensor's shape or dtype fits no layout.
    """
    num_outputs, num_inputs = tensors.num_outputs, tensors.num_inputs
    if "SCB" in tensors.specs:
        taken = {
            "weight": tensors.take("weight", [(num_outputs, num_inputs)], torch.int8),
            "SCB": tensors.take("SCB", [(num_outputs,)], torch.float32),
        }
        if "weight_format" in tensors.specs:
            taken["weight_format"] = tensors.take("weight_format", [(), (1,)], torch.uint8)
        return StoredWeight(taken, partial(_read_int8, tensors))
    kind = next((kind for kind in _KINDS if _STATE + kind in tensors.specs), None)
    if kind is None:
        if "weight.absmax" in tensors.specs:
            raise tensors.refuse("weight.quant_state", f"none of {', '.join(_KINDS)} is in the checkpoint")
        return None
    if num_inputs % 2:
        raise tensors.refuse("weight", f"{num_inputs} inputs: a byte would hold codes of two outputs")
    taken = {
        "weight": tensors.take("weight", [(num_outputs * num_inputs // 2, 1)], torch.uint8),
        "weight.quant_map": tensors.take("weight.quant_map", [(16,)], torch.float32),
        "weight.absmax": _take_row(tensors, "weight.absmax", torch.float32, torch.uint8),
        _STATE + kind: _take_row(tensors, _STATE + kind, torch.uint8),
    }
    if taken["weight.absmax"][1] == torch.uint8:
        taken["weight.nested_absmax"] = _take_row(tensors, "weight.nested_absmax", torch.float32)
        taken["weight.nested_quant_map"] = tensors.take("weight.nested_quant_map", [(256,)], torch.float32)
    return StoredWeight(taken, partial(_read_4_bits, tensors, kind))


def _take_row(tensors: StoredTensors, name: str, *dtypes: torch.dtype) -> tuple[tuple[int, ...], Any]:
    shape = tensors.specs[name][0] if name in tensors.specs else ()
    return tensors.take(name, [shape if len(shape) == 1 else (-1,)], *dtypes)


def _read_int8(tensors: StoredTensors, given: Mapping[str, Tensor]) -> Grouped:
    if "weight_format" in given and (form := int(given["weight_format"])) != _ROWS:
        raise tensors.refuse("weight_format", f"{form} is not {_ROWS}, row by row")
    whole = -(-tensors.num_inputs // 32) * 32
    return tensors.grouped(kind="snorm8", group=whole, values=given["weight"], scales=given["SCB"].reshape(-1, 1))


def _read_4_bits(tensors: StoredTensors, kind: CodeKind, given: Mapping[str, Tensor]) -> Grouped:
    state = _state_of(tensors, kind, given[_STATE + kind])
    if not torch.equal(given["weight.quant_map"], torch.tensor(TABLES[kind])):
        raise tensors.refuse("weight.quant_map", f"not the numbers of {kind}")
    num_outputs, num_inputs, block = tensors.num_outputs, tensors.num_inputs, state["blocksize"]
    largest = _absmax(tensors, state, given)
    num_blocks = -(-num_outputs * num_inputs // block)
    if len(largest) != num_blocks:
        raise tensors.refuse("weight.absmax", f"{len(largest)} numbers, not {num_blocks} for blocks of {block}")
    group = gcd(num_inputs, block)  # blocks go on from one output to the next
    if group < 16 or (group != 16 and group % 32):
        raise tensors.refuse(
            "weight", f"{num_inputs} inputs in blocks of {block} give groups of {group}, not of 16 or 32"
        )
    places = torch.arange(0, num_outputs * num_inputs, group) // block
    packed = given["weight"].reshape(num_outputs, num_inputs // 2)
    return tensors.grouped(
        kind=kind,
        group=group,
        values=packed >> 4 | packed << 4,  # the first of two codes is in the high half
        scales=largest[places].reshape(num_outputs, -1),
    )


def _absmax(tensors: StoredTensors, state: Mapping[str, Any], given: Mapping[str, Tensor]) -> Tensor:
    codes = given["weight.absmax"]
    if codes.dtype == torch.float32:
        return codes
    nested, block = given["weight.nested_absmax"], state["nested_blocksize"]
    if len(nested) != -(-len(codes) // block):
        raise tensors.refuse("weight.nested_absmax", f"{len(nested)} numbers for {len(codes)} in blocks of {block}")
    numbers = given["weight.nested_quant_map"][codes.int()] * nested.repeat_interleave(block)[: len(codes)]
    return numbers + torch.tensor(state["nested_offset"], dtype=torch.float32)


def _state_of(tensors: StoredTensors, kind: CodeKind, packed: Tensor) -> dict[str, Any]:
    name = _STATE + kind
    if len(packed) > _MAX_STATE_BYTES:
        raise tensors.refuse(name, f"{len(packed)} bytes, above {_MAX_STATE_BYTES}")
    try:
        state: dict[str, Any] = json.loads(bytes(packed.tolist()))
        found: dict[str, Any] = {
            field: state.get(field) for field in ("quant_type", "blocksize", "shape", "nested_blocksize")
        }
        found["nested_offset"] = float(state.get("nested_offset", 0.0))
    except Exception as error:  # whatever its contents are taken for
        raise tensors.refuse(name, f"no state of a quantization: {type(error).__name__}: {error}") from error
    if found["quant_type"] != kind:
        raise tensors.refuse(name, f"quant_type = {found['quant_type']!r}")
    if found["shape"] != [tensors.num_outputs, tensors.num_inputs]:
        raise tensors.refuse(name, f"shape = {found['shape']!r}, not {[tensors.num_outputs, tensors.num_inputs]}")
    for field in ("blocksize", "nested_blocksize"):
        is_nested = field == "nested_blocksize"
        if is_nested and "weight.nested_absmax" not in tensors.specs:
            continue
        if type(found[field]) is not int or not 16 <= found[field] <= 1 << 20:
            raise tensors.refuse(name, f"{field} = {found[field]!r} is not 16 to {1 << 20}")
    return found
