"""The tensors of a layer's quantised weight in safetensors files, read from their headers.

It knows names, shapes and dtypes, and the packing of 2-, 4- and 8-bit codes in words; it knows no format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.experts import is_experts
from betoken.engine.weights.stored import Plan, Stored, StoredExperts, StoredWeight
from betoken.engine.weights.tensor_files import DTYPES, StoredTensor
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import pack
from betoken.kernels.linear_grouped.codes import unpack as unpack_codes

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

Spec = tuple[tuple[int, ...], str]
"""Shape, and dtype as safetensors names it."""


@dataclass(slots=True)
class StoredTensors:
    """The tensors of one layer [N, K] in a checkpoint."""

    method: str
    """The quantisation's name in config.json."""
    path: str
    num_outputs: int
    num_inputs: int
    specs: Mapping[str, Spec]
    """By the name below the layer's."""

    def refuse(self, name: str, what: str) -> ModelRefusedError:
        """The error for one of its tensors."""
        return ModelRefusedError(f"{self.method}: {self.path}.{name}: {what}")

    def take(self, name: str, shapes: list[tuple[int, ...]], *dtypes: torch.dtype) -> tuple[tuple[int, ...], Any]:
        """A tensor's shape and dtype.

        Raises:
            ModelRefusedError: it is not there, or has none of these.
        """
        if name not in self.specs:
            raise self.refuse(name, "is not in the checkpoint")
        shape, dtype_name = self.specs[name]
        if shape not in shapes or DTYPES.get(dtype_name) not in dtypes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(name, f"{list(shape)} of {dtype_name}, not {expected} of {types}")
        return shape, DTYPES[dtype_name]

    def grouped(self, **given: Any) -> Grouped:
        """The weight.

        Raises:
            ModelRefusedError: scales that are not finite, or a weight that no kernel takes.
        """
        if not bool(given["scales"].float().isfinite().all()):
            raise self.refuse("scales", "not all are finite")
        try:
            return Grouped(num_inputs=self.num_inputs, **given)
        except ValueError as error:
            raise self.refuse("weight", str(error)) from error


Files = Mapping[str, StoredTensor]
"""The tensors of a checkpoint by name."""
ReadLayer = Callable[[StoredTensors], StoredWeight | None]
"""Storage of a layer's weight, None if it is dense."""


def split_name(key: str) -> tuple[str, str]:
    """The layer's path and the name below it; what belongs to a weight, as `weight.absmax`, keeps that before it."""
    layer, is_part, name = key.partition(".weight.")
    if is_part:
        return layer, f"weight.{name}"
    layer, _, name = key.rpartition(".")
    return layer, name


def by_layer(files: Files) -> dict[str, dict[str, Spec]]:
    """Every tensor's shape and dtype: by layer, by name below it."""
    found: dict[str, dict[str, Spec]] = {}
    for key in sorted(files, key=dot_natural_key):
        layer, name = split_name(key)
        found.setdefault(layer, {})[name] = (files[key].shape, files[key].dtype)
    return found


def plan_of(method: str, files: Files, stored: ReadLayer) -> Plan:
    """Layers whose tensors `stored` can read; layers for which it returns None stay dense."""

    def plan(model: Any) -> dict[str, Stored]:
        specs = by_layer(files)
        places = Places(model)
        found: dict[str, Stored] = {}
        experts: dict[str, dict[str, list[str]]] = {}
        for layer in specs:
            path, pattern = places.of(layer)
            if pattern is not None:
                experts.setdefault(path, {}).setdefault(pattern, []).append(layer)
                continue
            shape = _shape_of(model, path)
            if shape is not None and (weight := read_layer(method, files, stored, layer, shape, specs[layer])):
                found[path] = weight
        for path, layers in experts.items():
            if joined := _experts_of(method, files, stored, model, places, path, layers, specs):
                found[path] = joined
        for target in getattr(model, "_tied_weights_keys", None) or {}:
            if model.config.tie_word_embeddings and target.removesuffix(".weight") in found:
                raise ModelRefusedError(
                    f"{method}: {target} is quantized, though tie_word_embeddings says that it is another's weight"
                )
        return found

    return plan


class Places:
    """Maps a checkpoint's layers to a model's, by transformers' own table."""

    def __init__(self, model: Any) -> None:
        transforms: list[Any] = get_model_conversion_mapping(model)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._prefix, self._state = model.base_model_prefix, model.state_dict()

    def of(self, layer: str) -> tuple[str, str | None]:
        """The path of the layer, or of the weight that it is a part of and the pattern that says which part."""
        found, pattern = self.find(f"{layer}.weight")
        return found if pattern is not None else found.removesuffix(".weight"), pattern

    def find(self, key: str) -> tuple[str, str | None]:
        """The model's name of a tensor, or of the weight that it is a part of and the pattern that says which part."""
        found, pattern = rename_source_key(key, self._renamings, self._converters, self._prefix, self._state)
        return (key, None) if found not in self._state and key in self._state else (found, pattern)

    def part_of(self, pattern: str) -> int | None:
        """Which part of every expert's weight, from the top, layers of a pattern are; None: experts are not merged."""
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        kinds = [type(operation) for operation in converter.operations]
        is_merged = kinds in ([MergeModulelist], [MergeModulelist, Concatenate]) and all(
            cast(Any, operation).dim == place for place, operation in enumerate(converter.operations)
        )
        return list(converter.source_patterns).index(pattern) if is_merged else None


def _shape_of(model: Any, path: str) -> tuple[int, int] | None:
    """Outputs and inputs of a linear layer or an embedding, None of others."""
    try:
        layer = model.get_submodule(path)
    except AttributeError:
        return None
    if not isinstance(layer, (nn.Linear, nn.Embedding, Conv1D)):
        return None
    height, width = layer.weight.shape
    return (width, height) if isinstance(layer, Conv1D) else (height, width)


def read_layer(
    method: str, files: Files, stored: ReadLayer, layer: str, shape: tuple[int, int], specs: Mapping[str, Spec]
) -> StoredWeight | None:
    """Storage of a layer's weight of that shape, whose tensors are read from the files; None if it is dense."""
    weight = stored(StoredTensors(method, layer, *shape, specs))
    if weight is None:
        return None
    keys = tuple(f"{layer}.{name}" for name in weight.tensors)
    return replace(weight, fetch=lambda name: files[f"{layer}.{name}"].read(), keys=keys)


def _experts_of(
    method: str,
    files: Files,
    stored: ReadLayer,
    model: Any,
    places: Places,
    path: str,
    layers: Mapping[str, list[str]],
    specs: Mapping[str, Mapping[str, Spec]],
) -> StoredExperts | None:
    """The experts of a module, one after the other, each of its parts one below the other; None if all are dense."""
    is_quantized = any(set(specs[layer]) - {"weight", "bias"} for part in layers.values() for layer in part)
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent) if is_quantized else None
    if module is None:
        return None
    first = next(iter(layers.values()))[0]
    parts = {places.part_of(pattern): part for pattern, part in layers.items()}
    if not is_experts(module) or None in parts or sorted(cast(Any, parts)) != list(range(len(parts))):
        raise ModelRefusedError(f"{method}: {first}: a part of {path}, which is not put together from experts")
    num_experts, height, num_inputs = getattr(module, name).shape
    if module.is_transposed or height % len(parts) or any(len(part) != num_experts for part in parts.values()):
        raise ModelRefusedError(f"{method}: {first}: not one of {num_experts} experts, {len(parts)} layers each")
    weights = [
        (layer, read_layer(method, files, stored, layer, (height // len(parts), num_inputs), specs[layer]))
        for expert in range(num_experts)
        for layer in (parts[part][expert] for part in range(len(parts)))
    ]
    for layer, weight in weights:
        if weight is None:
            raise ModelRefusedError(
                f"{method}: {layer}: {', '.join(specs[layer])}: not the tensors of the format, as every expert has"
            )
    return StoredExperts(num_experts, tuple(weight for _, weight in weights if weight is not None))


def check_group(method: str, field: str, group: Any, num_inputs: int) -> int:
    """Inputs that share a scale; -1 or None means all.

    Raises:
        ModelRefusedError: the kernels lack such groups.
    """
    if group in (-1, None):
        return -(-num_inputs // 32) * 32
    if not isinstance(group, int) or isinstance(group, bool) or group < 16 or (group != 16 and group % 32):
        raise ModelRefusedError(f"{method}: {field} = {group!r} is neither -1, 16 nor a multiple of 32")
    return group


def integer_weight(
    tensors: StoredTensors,
    bits: int,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    group: int,
    order: Tensor | None = None,
) -> Grouped:
    """w = scale * (code - zero).

    Args:
        codes: uint8 [N, bytes of K inputs at least], the first of several codes in the lowest bits.
        scales: [N, G] float.
        zeros: int32 [N, G]; None is half of the codes' range.
        order: [K], see `order_of`.
    """
    half, num_inputs = 1 << bits - 1, tensors.num_inputs
    if order is not None:
        codes = (unpack_codes(codes, bits, num_inputs) if bits < 8 else codes[:, :num_inputs]).index_select(1, order)
        codes = pack(codes, bits) if bits < 8 else codes
    if zeros is not None and bool((zeros == half).all()):
        zeros = None
    given: dict[str, Any] = {"group": group, "scales": scales.contiguous(), "order": order}
    if bits < 8:
        values = codes[:, : -(-num_inputs * bits // 8)].contiguous()
        given |= {"zero": half} if zeros is None else {"zeros": zeros.to(torch.uint8).contiguous()}
        return tensors.grouped(kind="int2" if bits == 2 else "int4", values=values, **given)
    values = (codes[:, :num_inputs] ^ 128).contiguous().view(torch.int8)
    if zeros is not None and bool((zeros > 255).any()):
        raise tensors.refuse("zeros", "one is above 255")
    less = None if zeros is None else (zeros - half).to(torch.int8).contiguous()
    return tensors.grouped(kind="int8", values=values, zeros=less, **given)


def order_of(tensors: StoredTensors, name: str, groups: Tensor | None, group: int) -> Tensor | None:
    """Permutation [K] int32 that makes each group contiguous, from the group of each input [K]; None if they are.

    Raises:
        ModelRefusedError: an index past the last group, or a group of another size.
    """
    num_inputs = tensors.num_inputs
    natural = torch.arange(num_inputs) // group
    if groups is None or torch.equal(groups.long(), natural) or bool((groups == -1).all()):
        return None
    lowest, highest, last = int(groups.min()), int(groups.max()), -(-num_inputs // group) - 1
    if lowest < 0 or highest > last:
        raise tensors.refuse(name, f"{lowest if lowest < 0 else highest} is not a group: groups are 0 to {last}")
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], natural):
        raise tensors.refuse(name, f"groups that are not of {group} inputs each")
    return order.int()


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """int32 [R, C], lowest bits first -> int32 [R, width]."""
    codes = packed.contiguous().view(torch.uint8)
    return (unpack_codes(codes, bits, width) if bits < 8 else codes[:, :width]).int()
