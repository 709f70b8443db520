"""The part of a PARD-2 checkpoint that reads hidden states of the target: fields of config.json, and a projection.

The embedding of position p is E(token of p) + scale * projection(states of position p - 1); position 0 has the
embedding alone. Knows files and tensors; no sequences.
Source: PARD-2, arXiv:2605.08632.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from betoken.drafters.side.config import read_integer, read_number
from betoken.drafters.side.files import check_tensor
from betoken.engine.errors import ModelRefusedError
from betoken.engine.parts import ModelParts
from betoken.engine.weights.tensor_files import open_tensors

FILE = "warp_model.bin"
"""File of the projection."""
_LAYERS, _DIM, _SCALE, _BIAS = "pard2_target_layers", "pard2_target_dim", "pard2_scale", "pard2_proj_bias"
_WEIGHT_NAME, _BIAS_NAME = "target_proj.weight", "target_proj.bias"


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """The states that a checkpoint reads, and how it adds them."""

    layers: tuple[int, ...]
    """Entries of `output_hidden_states` of the target, in the order of the projection's input; -1 is the last."""
    dim: int
    """Width of all of them together."""
    scale: float
    has_bias: bool

    def states_of(self, num_layers: int, hidden_size: int) -> tuple[int, ...]:
        """The states that are read of a target, from 0; none if the checkpoint was made for another target, with more
        layers or another width."""
        num_states = num_layers + 1
        is_fit = len(self.layers) * hidden_size == self.dim
        if not is_fit or not all(-num_states <= layer < num_states for layer in self.layers):
            return ()
        return tuple(layer % num_states for layer in self.layers)


def features_of(config: Mapping[str, Any]) -> TargetFeatures | None:
    """The states that a config.json names; None if the checkpoint reads none.

    Raises:
        ModelRefusedError: a field is missing or wrong.
    """
    if config.get("spd_type") != "pard2" and not config.get("pard2"):
        return None
    layers = config.get(_LAYERS)
    if not isinstance(layers, list) or not layers or not all(type(layer) is int for layer in layers):
        raise ModelRefusedError(f"{_LAYERS}: {layers!r}: must be a list of layers")
    dim = read_integer(config, _DIM, 4096)
    if dim % len(layers):
        raise ModelRefusedError(f"{_DIM}: {dim}: must be a multiple of {len(layers)}, the number of {_LAYERS}")
    has_bias = config.get(_BIAS, False)
    if type(has_bias) is not bool:
        raise ModelRefusedError(f"{_BIAS}: {has_bias!r}: must be true or false")
    return TargetFeatures(tuple(layers), dim, read_number(config, _SCALE, 0.02), has_bias)


def load_projection(directory: Path, features: TargetFeatures, parts: ModelParts) -> Callable[[Tensor], Tensor]:
    """The projection of a checkpoint: states [R, S, Ht] in the order of `features.layers` -> vectors [R, H] in the
    draft model's type, which are added to embeddings.

    Args:
        parts: the draft model's.

    Raises:
        ModelRefusedError: the file cannot be read, or holds other tensors.
    """
    stored = open_tensors(directory / FILE)
    sizes = {_WEIGHT_NAME: torch.Size((parts.hidden_size, features.dim))}
    sizes |= {_BIAS_NAME: torch.Size((parts.hidden_size,))} if features.has_bias else {}
    if names := sorted(stored.keys() ^ sizes.keys()):
        fault = "is missing" if names[0] in sizes else "does not belong to the projection"
        raise ModelRefusedError(f"{FILE}: {names[0]}: {fault} ({_BIAS} = {features.has_bias})")
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    for name, tensor in tensors.items():
        try:
            check_tensor(name, tensor, sizes[name])
        except ModelRefusedError as error:
            raise ModelRefusedError(f"{FILE}: {error}") from error
    layer = parts.linear(tensors[_WEIGHT_NAME], tensors.get(_BIAS_NAME))

    @torch.inference_mode()
    def project(states: Tensor) -> Tensor:
        with parts.rows_alone():
            vectors: Tensor = layer(states.flatten(1).to(parts.device, parts.dtype)) * features.scale
            return vectors

    return project
