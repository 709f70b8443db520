"""The tensors of a GGUF file as the weights of a model, read one by one from the file.

It knows types and shapes; `places` knows the parameters.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from betoken.common.gguf import GgufHeader, GgufTensor, default_sampling
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import ARCHITECTURES
from betoken.engine.weights.experts import is_experts
from betoken.engine.weights.fingerprint import SAMPLE_BYTES
from betoken.engine.weights.gguf.blocks import GROUPED_TYPES, read_blocks
from betoken.engine.weights.gguf.places import Place, Places, places_of, row_order
from betoken.engine.weights.stored import Narrow, Stored, StoredConfig, StoredExperts, StoredWeight, load_beside
from betoken.kernels.linear_grouped import Grouped

_DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def hash_header(header: GgufHeader) -> str:
    """SHA-256 hex of the header of each file and of 4 KiB from the start, middle and end of each tensor."""
    digest = hashlib.sha256()
    for part in (header, *header.parts):
        with part.path.open("rb") as file:
            digest.update(file.read(part.num_bytes))
            for tensor in header.tensors:
                if tensor.path != part.path:
                    continue
                for place in (0, tensor.num_bytes // 2, max(0, tensor.num_bytes - SAMPLE_BYTES)):
                    file.seek(tensor.start + place)
                    digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes - place)))
    return digest.hexdigest()


def load(
    header: GgufHeader,
    config: PreTrainedConfig,
    keywords: dict[str, Any],
    progress: Callable[[float], None],
    narrow: Narrow | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The model and transformers' report of what it lacks; `keywords` go to `from_pretrained`, `progress` gets
    the fraction of weights read so far; `narrow` selects parts of the weights.

    Raises:
        ModelRefusedError: a tensor's place or shape in the model is unknown.
    """
    state: dict[str, Any] = {}

    def plan(model: Any) -> dict[str, Stored]:
        placed = Placed(header, config, model)
        state.update(placed.dense())
        return placed.plan()

    if keywords.get("dtype") == "auto":
        keywords = keywords | {"dtype": _dtype_of(header)}
    config.quantization_config = StoredConfig(plan, progress)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, report = load_beside(found[0] if isinstance(found, tuple) else found, config, state, keywords, narrow)
    for name, value in default_sampling(header).items():
        setattr(model.generation_config, name, value)
    return model, report


def _dtype_of(header: GgufHeader) -> torch.dtype:
    """Dtype of a file without quantised tensors, norms apart; bfloat16 for others."""
    types = {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    return _DENSE_TYPES[types.pop()] if len(types) == 1 and types <= set(_DENSE_TYPES) else torch.bfloat16


class Placed:
    """A file's tensors by their places in a model."""

    def __init__(self, header: GgufHeader, config: PreTrainedConfig, model: Any, places: Places | None = None) -> None:
        """`places`: of the file's tensors; None = as transformers places them."""
        self.header, self.model = header, model
        self.places = places or places_of(header.architecture, config, model)
        self.parts: dict[str, dict[int, GgufTensor]] = {}
        self.in_turns: set[str] = set()
        """Names of weights the outputs of whose parts take turns."""
        known = ARCHITECTURES[header.architecture].rope_tensors  # the configuration has them
        num_layers = header.metadata.get(f"{header.architecture}.block_count")
        left_out = tuple(f"blk.{layer}." for layer in range(config.num_hidden_layers, num_layers or 0))
        for tensor in header.tensors:
            if tensor.name in known or tensor.name.startswith(left_out):
                continue
            if (place := self.places.of(tensor.name)) is None:
                raise self.refuse(tensor, f"has no place in {type(model).__name__} as transformers reads it")
            self._add(place, tensor)

    def _add(self, place: Place, tensor: GgufTensor) -> None:
        parts = self.parts.setdefault(place.name, {})
        if place.part in parts:
            raise self.refuse(tensor, f"and {parts[place.part].name!r} are both {place.name}")
        parts[place.part] = tensor
        if place.takes_turns:
            self.in_turns.add(place.name)

    def refuse(self, tensor: GgufTensor, what: str) -> ModelRefusedError:
        """The error for a tensor."""
        return ModelRefusedError(f"{tensor.path}: tensor {tensor.name!r} {what}")

    def dense(self) -> dict[str, "_Dense"]:
        """Weights of numbers, by their names."""
        return {
            name: _Dense(self, name, [parts[number] for number in sorted(parts)])
            for name, parts in self.parts.items()
            if not any(tensor.type in GROUPED_TYPES for tensor in parts.values())
        }

    def plan(self) -> dict[str, Stored]:
        """The form that loading asks for (`stored.Plan`)."""
        plan: dict[str, Stored] = {}
        for name, parts in self.parts.items():
            if any(tensor.type in GROUPED_TYPES for tensor in parts.values()):
                tensors = [parts[number] for number in sorted(parts)]
                is_stacked = len(tensors[0].shape) == 3
                path = name if is_stacked else name.removesuffix(".weight")
                plan[path] = self._experts(name, tensors) if is_stacked else self._layer(name, *tensors)
        for target, source in (getattr(self.model, "_tied_weights_keys", None) or {}).items():
            stored = plan.get(source.removesuffix(".weight"))
            if stored is not None and target not in self.parts and self.model.config.tie_word_embeddings:
                plan[target.removesuffix(".weight")] = stored
        return plan

    def _layer(self, name: str, tensor: GgufTensor) -> StoredWeight:
        path = name.removesuffix(".weight")
        layer = self.model.get_submodule(path) if path != name else None
        if not isinstance(layer, (nn.Linear, nn.Embedding, Conv1D)) or len(tensor.shape) != 2:
            raise self.refuse(tensor, f"is {tensor.type} {list(tensor.shape)}: no linear layer, embedding or experts")
        expected = tuple(layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape)
        if tensor.shape != expected:
            raise self.refuse(tensor, f"has shape {list(tensor.shape)}, not {list(expected)}")
        try:
            order = row_order(self.places, tensor.name, tensor.shape[0])
        except ValueError as error:
            raise self.refuse(tensor, f"is not stored row by row as the model has it: {error}") from error
        return self._stored([tensor], slice(0, tensor.shape[0]), order)

    def _experts(self, name: str, tensors: list[GgufTensor]) -> StoredExperts:
        path, _, own = name.rpartition(".")
        module = self.model.get_submodule(path)
        if not is_experts(module):
            raise self.refuse(tensors[0], f"is not a weight of experts of {type(self.model).__name__} as they are run")
        num_experts, *sizes = getattr(module, own).shape
        num_outputs, num_inputs = reversed(sizes) if module.is_transposed else sizes
        expected = (num_experts, num_outputs // len(tensors), num_inputs)
        for tensor in tensors:
            if tensor.shape != expected or len(tensors) != self._num_parts(own):
                raise self.refuse(tensor, f"has shape {list(tensor.shape)}, not {list(expected)}")
        if name in self.in_turns and len({tensor.type for tensor in tensors}) > 1:
            raise self.refuse(tensors[0], f"is {tensors[0].type}, and {tensors[1].name!r} is {tensors[1].type}")
        together = [tensors] if name in self.in_turns else [[tensor] for tensor in tensors]
        experts = [slice(expert * expected[1], (expert + 1) * expected[1]) for expert in range(num_experts)]
        return StoredExperts(
            num_experts, tuple(self._stored(parts, rows, None) for rows in experts for parts in together)
        )

    @staticmethod
    def _num_parts(own: str) -> int:
        return 2 if own == "gate_up_proj" else 1

    def _stored(self, tensors: Sequence[GgufTensor], rows: slice, order: Tensor | None) -> StoredWeight:
        """These rows of tensors of one type, which take turns."""
        first = tensors[0]
        shape = (len(tensors) * (rows.stop - rows.start), first.row_bytes)
        inputs = self.places.input_order(first.name)
        read = partial(_read, first, None if inputs is None else inputs.int())

        def fetch(part: str) -> Tensor:
            blocks = [_blocks(tensor, rows, order) for tensor in tensors]
            return torch.stack(blocks, dim=1).flatten(0, 1) if len(blocks) > 1 else blocks[0]

        def part(own: slice) -> StoredWeight:
            return self._stored(tensors, slice(rows.start + own.start, rows.start + own.stop), order)

        return StoredWeight({"weight": (shape, torch.uint8)}, read, fetch, part=None if len(tensors) > 1 else part)


def _blocks(tensor: GgufTensor, rows: slice, order: Tensor | None) -> Tensor:
    """The bytes of some rows of the model's order, uint8 [N, bytes]; only the rows between them are read."""
    wanted = None if order is None else order[rows]
    first, last = (rows.start, rows.stop) if wanted is None else (int(wanted.min()), int(wanted.max()) + 1)
    count, width = last - first, tensor.row_bytes
    data = np.fromfile(tensor.path, np.uint8, count * width, offset=tensor.start + first * width)
    blocks = torch.from_numpy(data).reshape(count, width)
    return blocks if wanted is None else blocks[wanted - first]


def _read(tensor: GgufTensor, inputs: Tensor | None, tensors: Mapping[str, Tensor]) -> Grouped:
    try:
        weight = read_blocks(tensor.type, tensors["weight"], tensor.shape[-1], tensor.name)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{tensor.path}: {error}") from error
    return weight if inputs is None else replace(weight, order=inputs)


class _Dense:
    """A weight of numbers, read when transformers asks for it; of experts, its concatenated parts."""

    def __init__(self, placed: Placed, name: str, tensors: list[GgufTensor]) -> None:
        self._placed, self._tensors = placed, tensors
        self._takes_turns = name in placed.in_turns

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        first, *others = (tensor.shape for tensor in self._tensors)
        return (first[0], first[1] * (1 + len(others)), *first[2:]) if others else first

    def get_dtype(self) -> str:
        """The name by safetensors' convention."""
        return self._tensors[0].type

    def part(self, axis: int, start: int, stop: int) -> "_DensePart":
        """The part [start, stop) along a dimension."""
        return _DensePart(self, axis, start, stop)

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Some rows without the rest; None if the model has more than rows in another order."""
        tensor = self._tensors[0]
        if len(self._tensors) > 1 or len(tensor.shape) != 2:
            return None
        try:
            order = row_order(self._placed.places, tensor.name, tensor.shape[0])
        except ValueError:
            return None
        if self._placed.places.input_order(tensor.name) is not None:
            return None
        return _blocks(tensor, slice(start, stop), order).view(_DENSE_TYPES[tensor.type]).float()

    def __getitem__(self, _: Any) -> Tensor:
        parts = [self._numbers(tensor) for tensor in self._tensors]
        if self._takes_turns:
            return torch.stack(parts, dim=-1).flatten(-2)
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def _numbers(self, tensor: GgufTensor) -> Tensor:
        data = torch.from_numpy(np.fromfile(tensor.path, np.uint8, tensor.num_bytes, offset=tensor.start))
        numbers = data.view(_DENSE_TYPES[tensor.type]).reshape(tensor.shape)
        try:
            return self._placed.places.moved(tensor.name, numbers.float())
        except Exception as error:  # whatever transformers' functions make of another shape
            raise self._placed.refuse(tensor, f"{list(tensor.shape)}: {type(error).__name__}: {error}") from error


class _DensePart:
    """A part of a weight of numbers. Implements the slice interface of transformers' loader."""

    def __init__(self, whole: _Dense, axis: int, start: int, stop: int) -> None:
        self._whole, self._axis, self._start, self._stop = whole, axis, start, stop

    def get_dtype(self) -> str:
        """The name by safetensors' convention."""
        return self._whole.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        rows = self._whole.rows(self._start, self._stop) if self._axis == 0 else None
        if rows is None:
            rows = self._whole[index].narrow(self._axis, self._start, self._stop - self._start).clone()
        return rows
