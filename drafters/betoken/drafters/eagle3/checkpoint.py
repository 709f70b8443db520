"""Reads a draft layer from a directory in the layout of SafeAILab, SpecForge or speculators.

A layer of another width, vocabulary or base than the target's is refused by name, as is a file that holds too little or
too much. Knows files and names, not how a layer is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from betoken.drafters.eagle3.module import Eagle1Layer, Eagle3Layer, Rotary
from betoken.drafters.eagle3.module import make_layer as make_module
from betoken.drafters.eagle3.shape import EagleShape, read_shape
from betoken.drafters.side.files import TargetShape, check_tensor, read_json, read_tensors, target_ids, weight_files
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.tensor_files import open_tensors

_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """A layer with its weights, on the CPU in the type it was stored in."""

    layer: Eagle3Layer | Eagle1Layer
    embedding: Tensor | None
    """[V, H] its own embeddings; None if it uses the target's."""
    state_layers: tuple[int, ...]
    """The target states it reads; see `EagleShape.states_of`."""

    @property
    def shape(self) -> EagleShape:
        """Sizes and flags."""
        return self.layer.shape


def read_shape_of(directory: Path) -> EagleShape:
    """The shape of the layer in a directory; of its weights only names are read.

    Raises:
        ModelRefusedError: it is not such a directory, with the reason.
    """
    config = read_json(directory / "config.json")
    return read_shape(config, _version({name for path in weight_files(directory) for name in open_tensors(path)}))


def read_layer(directory: Path) -> tuple[EagleShape, dict[str, Tensor]]:
    """The shape and the tensors by SafeAILab's names.

    Raises:
        ModelRefusedError: it is not such a directory, with the reason.
    """
    config = read_json(directory / "config.json")
    tensors = read_tensors(directory)
    version = _version(tensors)
    if version == 3:
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    return read_shape(config, version), tensors


def load_layer(directory: Path, target: TargetShape) -> LoadedLayer:
    """The layer in a directory, for that target.

    Raises:
        ModelRefusedError: it cannot be read, or does not fit the target, with the reason.
    """
    try:
        shape, tensors = read_layer(directory)
        return make_layer(shape, tensors, target)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{directory}: {error}") from error


def make_layer(shape: EagleShape, tensors: Mapping[str, Tensor], target: TargetShape) -> LoadedLayer:
    """The layer of these tensors, by SafeAILab's names, for that target.

    Raises:
        ModelRefusedError: they do not fit each other or the target.
    """
    state_layers = shape.states_of(target.num_layers)
    _check_target(shape, target, _EMBEDDING in tensors)
    given = dict(tensors)
    embedding = given.pop(_EMBEDDING, None)
    if embedding is not None:
        check_tensor(_EMBEDDING, embedding, torch.Size((shape.vocab_size, shape.hidden_size)))
    with torch.device("meta"):  # no memory for weights that are replaced
        layer = make_module(shape)
    _check_names(layer, shape, given)
    ids = target_ids(given.pop("d2t", torch.zeros(shape.draft_vocab_size)), shape.vocab_size)
    layer.load_state_dict(given, strict=False, assign=True)
    layer.rotary = Rotary(shape)
    layer.d2t = ids - torch.arange(shape.draft_vocab_size)
    if isinstance(layer, Eagle3Layer):
        layer.t2d = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return LoadedLayer(layer.eval().requires_grad_(False), embedding, state_layers)


def _check_target(shape: EagleShape, target: TargetShape, has_embedding: bool) -> None:
    target.check(shape.base, shape.vocab_size, shape.draft_vocab_size)
    if shape.target_hidden_size != target.hidden_size:
        name = "target_hidden_size" if shape.target_hidden_size != shape.hidden_size else "hidden_size"
        raise ModelRefusedError(f"{name}: {shape.target_hidden_size}: must be {target.hidden_size}, the target's")
    if shape.version == 1 and shape.hidden_size != target.hidden_size:
        raise ModelRefusedError(f"hidden_size: {shape.hidden_size}: must be {target.hidden_size}, the target's")
    if shape.mask_token_id is not None and shape.mask_token_id >= target.vocab_size:
        raise ModelRefusedError(f"mask_token_id: {shape.mask_token_id}: must be below {target.vocab_size}")
    if not has_embedding and shape.hidden_size != target.hidden_size:
        limit = f"must be there, as the target's embeddings are {target.hidden_size} wide, not {shape.hidden_size}"
        raise ModelRefusedError(f"{_EMBEDDING}: {limit}")


def _check_names(layer: nn.Module, shape: EagleShape, given: Mapping[str, Tensor]) -> None:
    expected = layer.state_dict()
    # Without them every id has its own number.
    optional = {"t2d"} if shape.draft_vocab_size < shape.vocab_size else {"t2d", "d2t"}
    if missing := sorted(expected.keys() - given.keys() - optional):
        raise ModelRefusedError(f"{missing[0]} and {len(missing) - 1} more of its weights are not there")
    if unknown := sorted(given.keys() - expected.keys()):
        flags = ", ".join(flag for flag in ("norm_before_fc", "fc_norm") if not getattr(shape, flag))
        raise ModelRefusedError(
            f"{unknown[0]} and {len(unknown) - 1} more are weights no such layer has (off: {flags})"
        )
    for name, tensor in given.items():
        check_tensor(name, tensor, expected[name].shape)


def _version(names: Iterable[str]) -> int:
    return 3 if any(name.endswith("hidden_norm.weight") for name in names) else 1
