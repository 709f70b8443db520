"""Lets the loader read a rank's columns of each weight instead of the whole weight.

Weights that transformers puts together in a way not known here are read whole.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.ranks.columns import Columns
from betoken.engine.weights.stored import Stored, StoredExperts, StoredWeight
from betoken.engine.weights.stored_files import Places
from betoken.kernels.linear_grouped import Grouped


def narrow_tensors(model: Any, state: dict[str, Any], columns: Mapping[str, Columns]) -> None:
    """Replace tensors of a checkpoint by their parts, and the parameters of a model on the meta device by smaller ones.

    Args:
        state: tensors by name, which have `part`.
        columns: output columns to read, by path of the layer or of a module's own weight.
    """
    places = Places(model)
    sources: dict[str, dict[str, str | None]] = {}
    for key in state:
        name, pattern = places.find(key)
        path = name.removesuffix(".weight")
        if path in columns:
            sources.setdefault(path, {})[key] = pattern
    for path, patterns in sources.items():
        module, name, axis = _weight_of(model, path)
        weight, own = getattr(module, name), columns[path]
        parts = _parts(places, {key: state[key] for key in patterns}, patterns, tuple(weight.shape), axis, own)
        if parts:
            state.update(parts)
            smaller = weight.data.narrow(axis, own.start, own.size)
            setattr(module, name, nn.Parameter(smaller, requires_grad=False))


def _weight_of(model: Any, path: str) -> tuple[Any, str, int]:
    """The module with a weight, the weight's name, and its dimension of outputs."""
    parent, _, name = path.rpartition(".")
    module: Any = model.get_submodule(parent)
    weight = getattr(module, name)
    if isinstance(weight, nn.Module):
        return weight, "weight", 1 if isinstance(weight, Conv1D) else 0
    return module, name, 2 if module.is_transposed else 1


def _parts(
    places: Places,
    tensors: Mapping[str, Any],
    patterns: Mapping[str, str | None],
    shape: tuple[int, ...],
    axis: int,
    own: Columns,
) -> dict[str, Any]:
    """The tensors' parts that the loader makes the columns of; none if it has to read the weight whole."""
    if len(tensors) == 1 and None in patterns.values():
        ((key, tensor),) = tensors.items()
        return {key: tensor.part(axis, own.start, own.stop)} if tuple(tensor.shape) == shape else {}
    numbers = {key: None if pattern is None else places.part_of(pattern) for key, pattern in patterns.items()}
    if None in numbers.values() or axis != 1 or len(shape) != 3:
        return {}
    num_parts = len(set(numbers.values()))
    height = shape[1] // num_parts
    if any(tuple(tensor.shape) != (height, shape[2]) for tensor in tensors.values()):
        return {}
    found = {}
    for key, number in cast(dict[str, int], numbers).items():
        start, stop = (min(max(place - number * height, 0), height) for place in own[:2])
        found[key] = tensors[key].part(0, start, stop)
    return found


def narrow_stored(stored: Mapping[str, Stored], columns: Mapping[str, Columns]) -> dict[str, Stored]:
    """Let weights in their checkpoint's bits be read by the columns; tied layers share a weight as before."""
    made: dict[tuple[int, int], Stored] = {}
    found: dict[str, Stored] = {}
    for path, weight in stored.items():
        own = columns.get(path)
        if own is None:
            found[path] = weight
            continue
        key = (id(weight), own.start)
        found[path] = made[key] = made[key] if key in made else _narrow(weight, own)
    return found


def _narrow(stored: Stored, own: Columns) -> Stored:
    if isinstance(stored, StoredExperts):
        return replace(stored, outputs=own.range)
    return stored.part(own.range) if stored.part is not None else _cut(stored, own)


def _cut(stored: StoredWeight, own: Columns) -> StoredWeight:
    """Storage that is read whole, unless the loader brings the columns alone."""

    def read(given: Mapping[str, Any]) -> Grouped:
        weight = stored.read(given)
        return weight if weight.shape[0] == own.size else weight.copied_rows(own.range)

    return replace(stored, read=read)
