"""Files of layers that an attached drafter reads: config.json and tensors. Knows names, not how layers are run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_is_file, shard_paths
from betoken.engine.weights.tensor_files import open_tensors

_INDEX, _WHOLE, _PICKLED = "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin"
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
    max_context: int = 0
    """Tokens of the longest sequence of the worker; 0 if unknown."""

    def check(self, base: str, vocab_size: int, draft_vocab_size: int) -> None:
        """Raises:
        ModelRefusedError: layers for the target `base` (empty = unknown) with these vocabularies do not fit.
        """
        if base and Path(base).name.lower() != Path(self.name).name.lower():
            raise ModelRefusedError(f"base: {base!r}: must be {self.name!r}, the target")
        if vocab_size != self.vocab_size:
            raise ModelRefusedError(f"vocab_size: {vocab_size}: must be {self.vocab_size}, the target's")
        if draft_vocab_size > vocab_size:
            raise ModelRefusedError(f"draft_vocab_size: {draft_vocab_size}: must be at most {vocab_size}")


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a layer's weights.

    Raises:
        ModelRefusedError: there are none, or an index names what is none.
    """
    index = directory / _INDEX
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict):
            raise ModelRefusedError(f"{_INDEX}: weight_map must be an object")
        return shard_paths(index, sorted(set(names.values()), key=str))
    for name in (_WHOLE, _PICKLED):
        if (directory / name).exists():
            return [directory / name]
    raise ModelRefusedError(f"there is neither {_WHOLE} nor {_PICKLED}")


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors in a directory by their plain names.

    Raises:
        ModelRefusedError: a file cannot be read.
    """
    stored = {name: tensor for path in weight_files(directory) for name, tensor in open_tensors(path).items()}
    return {_plain_name(name): tensor.read() for name, tensor in stored.items() if not name.endswith(_LEFT_ALONE)}


def check_tensor(name: str, tensor: Tensor, size: torch.Size) -> None:
    """Raises:
    ModelRefusedError: a tensor of another size, or not of floating-point numbers.
    """
    if tensor.shape != size:
        raise ModelRefusedError(f"{name}: {list(tensor.shape)}: must be {list(size)}")
    if name not in ("d2t", "t2d") and not tensor.is_floating_point():
        raise ModelRefusedError(f"{name}: {tensor.dtype}: must be a floating-point type, the layer is read dense")


def target_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return [Vd] int64, the target's id of each of the draft's, from the stored offsets.

    Raises:
        ModelRefusedError: an id is out of range or occurs twice.
    """
    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelRefusedError(f"d2t: an id is outside [0, {vocab_size})")
    if len(set(ids.tolist())) != len(ids):
        raise ModelRefusedError("d2t: two of the draft's ids are one of the target's")
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        ModelRefusedError: it cannot be read, or holds something else.
    """
    check_is_file(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefusedError(f"{path.name}: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefusedError(f"{path.name}: must be an object")
    return content


def _plain_name(name: str) -> str:
    return name.removeprefix("model.").removeprefix("draft_model.")
