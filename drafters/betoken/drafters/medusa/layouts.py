"""How Medusa heads are named on disk: FasterDecoding's layout (both versions), LoRAX adapters, vLLM's, and heads that
are part of the target's checkpoint.

Knows names and shapes; heads are counted from the tensors, since published configs count wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.tensor_files import FileTensor

PREFIX_IN_TARGET = "medusa_head."
"""Beginning of the heads' names in a target's checkpoint."""

_PREFIXES = (PREFIX_IN_TARGET, "medusa_heads.", "medusa.")
_BLOCK = re.compile(r"(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)|blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_HEAD = re.compile(r"(\d{1,3})\.(\d{1,3})\.weight|lm_heads\.(\d{1,3})\.weight")
_SHARED_HEAD, _TOKEN_MAP = "lm_head.weight", "token_map"


@dataclass(frozen=True, slots=True)
class HeadsLayout:
    """Names of the tensors of the heads."""

    blocks: list[list[tuple[FileTensor, FileTensor | None]]]
    """Weight [H, H] and bias [H] of each head's residual blocks."""
    output_layers: list[FileTensor]
    """Weight [V', H] of each head's output layer; one for all, or none if it is the target's."""
    token_map: FileTensor | None
    """[V'] ids of the target that the rows of output layers stand for; None = their own numbers."""

    @property
    def num_heads(self) -> int:
        """How many tokens are guessed."""
        return len(self.blocks)


def lay_out(tensors: Mapping[str, FileTensor], hidden_size: int, vocab_size: int) -> HeadsLayout:
    """The heads that these tensors are, for a target of that width and vocabulary.

    Raises:
        ModelRefusedError: they are none, or not for this target, with the tensor's name.
    """
    blocks: dict[tuple[int, int], dict[str, FileTensor]] = {}
    outputs: dict[int, FileTensor] = {}
    shared: list[FileTensor] = []
    token_map = None
    for name, tensor in tensors.items():
        plain = _plain(name)
        if found := _BLOCK.fullmatch(plain):
            head, block, part = (found[1], found[2], found[3]) if found[1] else (found[4], found[5], found[6])
            _check(name, tensor, [hidden_size] * 2 if part == "weight" else [hidden_size])
            blocks.setdefault((int(head), int(block)), {})[part] = tensor
        elif found := _HEAD.fullmatch(plain):
            outputs[int(found[1] or found[3])] = tensor
        elif plain == _SHARED_HEAD:
            shared.append(tensor)
        elif plain == _TOKEN_MAP:
            token_map = tensor
        else:
            raise ModelRefusedError(f"{name} is not a part of Medusa heads")
    heads = _in_order(blocks)
    if len({bias is None for head in heads for _, bias in head}) > 1:
        raise ModelRefusedError("some blocks have a bias and some have none")
    layers = [outputs[head] for head in sorted(outputs)] or shared
    if outputs and sorted(outputs) != list(range(len(heads))):
        raise ModelRefusedError(f"{len(heads)} heads have {len(outputs)} output layers, of {sorted(outputs)}")
    num_rows = vocab_size if token_map is None else token_map.shape[0]
    for layer in layers:
        _check("an output layer", layer, [num_rows, hidden_size])
    if token_map is not None and not layers:
        raise ModelRefusedError(f"{_TOKEN_MAP} without an output layer")
    return HeadsLayout(heads, layers, token_map)


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _in_order(
    blocks: Mapping[tuple[int, int], Mapping[str, FileTensor]],
) -> list[list[tuple[FileTensor, FileTensor | None]]]:
    num_heads = 1 + max((head for head, _ in blocks), default=-1)
    num_blocks = 1 + max((block for _, block in blocks), default=-1)
    if not blocks:
        raise ModelRefusedError("no heads found")
    for head in range(num_heads):
        for block in range(num_blocks):
            if "weight" not in blocks.get((head, block), {}):
                raise ModelRefusedError(f"head {head} of {num_heads} lacks the weight of its block {block}")
    return [
        [(blocks[head, block]["weight"], blocks[head, block].get("bias")) for block in range(num_blocks)]
        for head in range(num_heads)
    ]


def _check(name: str, tensor: FileTensor, shape: list[int]) -> None:
    if list(tensor.shape) != shape:
        raise ModelRefusedError(f"{name}: {list(tensor.shape)}: must be {shape} for this target")
    if not tensor.is_floating_point:
        raise ModelRefusedError(f"{name} is quantized, which heads cannot be")


def check_base(config: Mapping[str, Any], target_names: set[str]) -> None:
    """Refuse heads that were made for another model; a config that names none is taken at its tensors' word.

    Args:
        target_names: what the target goes by; of paths and hub ids the last part counts.

    Raises:
        ModelRefusedError: `base_model_name_or_path` is another.
    """
    base = config.get("base_model_name_or_path")
    if base in (None, ""):
        return
    if not isinstance(base, str):
        raise ModelRefusedError("base_model_name_or_path: must be a text")
    known = {_last_part(name) for name in target_names if name}
    if _last_part(base) not in known:
        raise ModelRefusedError(f"base_model_name_or_path: {base!r}: must be {' or '.join(sorted(known))}, the target")


def _last_part(name: str) -> str:
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
