"""Reads a draft layer from a directory in the layout of SafeAILab, SpecForge or speculators.

A layer of another width, vocabulary or base than the target's is refused by name, as is a file that holds too little or
too much. Knows files and names, not how a layer is run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betoken.drafters.eagle3.module import Eagle1Layer, Eagle3Layer, Rotary
from betoken.drafters.eagle3.shape import EagleShape, read_shape
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_is_file, shard_paths
from betoken.engine.weights.tensor_files import open_tensors

_INDEX, _WHOLE, _PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
_EMBEDDING = "embed_tokens.weight"
_LEFT_ALONE = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
"""Ends of the names of tensors that training leaves in a file and that say nothing of the layer."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """The facts that a layer has to fit."""

    name: str
    """Hub id, or the directory's name."""
    vocab_size: int
    hidden_size: int
    num_layers: int


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
    config = _read_json(directory / "config.json")
    return read_shape(config, _version({name for path in weight_files(directory) for name in open_tensors(path)}))


def read_layer(directory: Path) -> tuple[EagleShape, dict[str, Tensor]]:
    """The shape and the tensors by SafeAILab's names.

    Raises:
        ModelRefusedError: it is not such a directory, with the reason.
    """
    config = _read_json(directory / "config.json")
    stored = {name: tensor for path in weight_files(directory) for name, tensor in open_tensors(path).items()}
    tensors = {_plain_name(name): tensor.read() for name, tensor in stored.items() if not name.endswith(_LEFT_ALONE)}
    version = _version(tensors)
    if version == 3:
        tensors = {name.replace("layers.0.", "midlayer.", 1): tensor for name, tensor in tensors.items()}
    return read_shape(config, version), tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a layer's weights.

    Raises:
        ModelRefusedError: there are none, or an index names what is none.
    """
    index = directory / _INDEX
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ModelRefusedError(f"{_INDEX}: weight_map must be an object")
        return shard_paths(index, sorted(set(names.values()), key=str))
    for name in (_WHOLE, _PICKLED):
        if (directory / name).exists():
            return [directory / name]
    raise ModelRefusedError(f"there is neither {_WHOLE} nor {_PICKLED}")


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
        _check_tensor(_EMBEDDING, embedding, torch.Size((shape.vocab_size, shape.hidden_size)))
    with torch.device("meta"):  # no memory for weights that are replaced
        layer = Eagle3Layer(shape) if shape.version == 3 else Eagle1Layer(shape)
    _check_names(layer, shape, given)
    ids = _target_ids(given.pop("d2t", torch.zeros(shape.draft_vocab_size)), shape)
    layer.load_state_dict(given, strict=False, assign=True)
    layer.rotary = Rotary(shape)
    layer.d2t = ids - torch.arange(shape.draft_vocab_size)
    if isinstance(layer, Eagle3Layer):
        layer.t2d = torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return LoadedLayer(layer.eval().requires_grad_(False), embedding, state_layers)


def _check_target(shape: EagleShape, target: TargetShape, has_embedding: bool) -> None:
    if shape.base and Path(shape.base).name.lower() != Path(target.name).name.lower():
        raise ModelRefusedError(f"base: {shape.base!r}: must be {target.name!r}, the target")
    if shape.vocab_size != target.vocab_size:
        raise ModelRefusedError(f"vocab_size: {shape.vocab_size}: must be {target.vocab_size}, the target's")
    if shape.draft_vocab_size > shape.vocab_size:
        raise ModelRefusedError(f"draft_vocab_size: {shape.draft_vocab_size}: must be at most {shape.vocab_size}")
    if shape.target_hidden_size != target.hidden_size:
        name = "target_hidden_size" if shape.target_hidden_size != shape.hidden_size else "hidden_size"
        raise ModelRefusedError(f"{name}: {shape.target_hidden_size}: must be {target.hidden_size}, the target's")
    if shape.version == 1 and shape.hidden_size != target.hidden_size:
        raise ModelRefusedError(f"hidden_size: {shape.hidden_size}: must be {target.hidden_size}, the target's")
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
        _check_tensor(name, tensor, expected[name].shape)


def _check_tensor(name: str, tensor: Tensor, size: torch.Size) -> None:
    if tensor.shape != size:
        raise ModelRefusedError(f"{name}: {list(tensor.shape)}: must be {list(size)}")
    if name not in ("d2t", "t2d") and not tensor.is_floating_point():
        raise ModelRefusedError(f"{name}: {tensor.dtype}: must be a floating-point type, the layer is read dense")


def _target_ids(d2t: Tensor, shape: EagleShape) -> Tensor:
    """[Vd] int64: the target's id of each of the draft's."""
    ids = torch.arange(shape.draft_vocab_size) + d2t.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab_size:
        raise ModelRefusedError(f"d2t: an id is outside [0, {shape.vocab_size})")
    if len(set(ids.tolist())) != len(ids):
        raise ModelRefusedError("d2t: two of the draft's ids are one of the target's")
    return ids


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").removeprefix("draft_model.")


def _read_json(path: Path) -> dict[str, Any]:
    check_is_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefusedError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefusedError(f"{path.name}: must be an object")
    return content


def _version(names: Iterable[str]) -> int:
    return 3 if any(name.endswith("hidden_norm.weight") for name in names) else 1
