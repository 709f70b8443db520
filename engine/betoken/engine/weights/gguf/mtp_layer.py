"""The MTP layer of a GGUF file: a decoder layer in the block after the model's own, and its `nextn` tensors.

Source: llama.cpp, conversion/qwen.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from betoken.common.gguf import GgufHeader, GgufTensor
from betoken.engine.weights.gguf.places import Place, Places, places_of
from betoken.engine.weights.gguf.tensors import Placed
from betoken.engine.weights.quantized import DenseTensor, dequantised
from betoken.engine.weights.stored import StoredExperts

NEXTN: Mapping[str, str] = {
    "nextn.eh_proj.": "eh_proj.",
    "nextn.enorm.": "enorm.",
    "nextn.hnorm.": "hnorm.",
    "nextn.shared_head_norm.": "post_norm.",
}
"""Beginnings of names after the block's -> their beginnings below `MtpLayer`; others are the decoder layer's."""
_COPIES = ("nextn.embed_tokens.", "nextn.shared_head_head.")
"""Tensors of the target, which are not read."""
_BLOCK, _LAYER, _OWN, _OWN_BLOCK = "blk.0.", "model.layers.0.", "layers.0.", "layers.0.mtp_block."


def read_mtp_layer(header: GgufHeader, config: PreTrainedConfig, target: Any, model: Any) -> dict[str, DenseTensor]:
    """The tensors of the first MTP layer by their names in `model`, dequantised when they are read; empty without any.

    Args:
        config: of the file.
        target: a target with one decoder layer, of the kind of the MTP layer's.
        model: transformers' `MtpModel` of one layer.

    Raises:
        ModelRefusedError: a tensor has no place in the layer.
    """
    start = f"blk.{config.num_hidden_layers}."
    tensors = [tensor for tensor in header.tensors if tensor.name.startswith(start)]
    if not any(tensor.name.startswith(f"{start}nextn.") for tensor in tensors):
        return {}
    left_out = tuple(start + name for name in _COPIES)
    metadata = {key: value for key, value in header.metadata.items() if not key.endswith(".block_count")}
    own = replace(
        header,
        metadata=metadata,
        tensors=tuple(tensor for tensor in tensors if not tensor.name.startswith(left_out)),
    )
    places = _LayerPlaces(places_of(header.architecture, target.config, target), start)
    placed = Placed(own, target.config, model, places)
    found = {
        name: DenseTensor(placed.parts[name][0].name, _shape(places, placed.parts[name]), partial(_whole, numbers))
        for name, numbers in placed.dense().items()
    }
    for path, stored in placed.plan().items():
        if isinstance(stored, StoredExperts):
            name, weights = path, stored.weights
        else:
            name, weights = f"{path}.weight", (stored,)
        parts = placed.parts[name]
        shape = _shape(places, parts)
        found[name] = DenseTensor(parts[0].name, shape, partial(_stacked, weights, shape))
    return found


class _LayerPlaces:
    """Places of a block's tensors in `MtpModel`: a decoder layer, as the target's first, and `nextn`."""

    def __init__(self, inner: Places, start: str) -> None:
        """`start`: beginning of the block's names."""
        self._inner, self._start = inner, start

    def of(self, name: str) -> Place | None:
        """See `Places`."""
        rest = name.removeprefix(self._start)
        for stored, own in NEXTN.items():
            if rest.startswith(stored):
                return Place(f"{_OWN}{own}{rest.removeprefix(stored)}")
        place = self._inner.of(_BLOCK + rest)
        if place is None or not place.name.startswith(_LAYER):
            return None
        return replace(place, name=_OWN_BLOCK + place.name.removeprefix(_LAYER))

    def moved(self, name: str, numbers: Tensor) -> Tensor:
        """See `Places`."""
        return self._inner.moved(self._alike(name), numbers)

    def input_order(self, name: str) -> Tensor | None:
        """See `Places`."""
        return self._inner.input_order(self._alike(name))

    def _alike(self, name: str) -> str:
        """A tensor of the target that is stored in the same way."""
        rest = name.removeprefix(self._start)
        if not rest.startswith("nextn."):
            return _BLOCK + rest
        return "output_norm.weight" if "norm." in rest else "output.weight"


def _shape(places: Places, parts: Mapping[int, GgufTensor]) -> tuple[int, ...]:
    """The shape of a parameter made of these tensors."""
    moved = [places.moved(tensor.name, torch.empty(tensor.shape, device="meta")) for tensor in parts.values()]
    return tuple(torch.cat(moved, dim=1).shape if len(moved) > 1 else moved[0].shape)


def _whole(numbers: Any) -> Tensor:
    tensor: Tensor = numbers[...]
    return tensor


def _stacked(weights: Any, shape: tuple[int, ...]) -> Tensor:
    return dequantised(weights).reshape(shape)
