"""Reads a block drafter from a directory in the layout of z-lab, DeepSpec, speculators or transformers.

A drafter of another width, vocabulary or base than the target's is refused by name, as is a file that holds too little
or too much. Knows files and names, not how layers are run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from betoken.drafters.dflash.module import BlockModel, make_rotary
from betoken.drafters.dflash.shape import BlockShape, read_shape
from betoken.drafters.side.files import TargetShape, check_tensor, read_json, read_tensors, target_ids
from betoken.engine.errors import ModelRefusedError

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_OTHER_NAMES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
    "candidate_selector.successor_codebook": "candidate_selector.successor_codebook.weight",
}
"""Names in files, or their beginnings, and ours."""


@dataclass(frozen=True, slots=True)
class LoadedBlock:
    """A block drafter with its weights, on the CPU in the type they were stored in."""

    model: BlockModel
    embedding: Tensor | None
    """[V, H] its own embeddings; None if it uses the target's."""
    state_layers: tuple[int, ...]
    """The target states it reads; see `BlockShape.states_of`."""

    @property
    def shape(self) -> BlockShape:
        """Sizes and flags."""
        return self.model.shape


def read_shape_of(directory: Path) -> BlockShape:
    """The shape of the drafter in a directory.

    Raises:
        ModelRefusedError: it is not such a directory, with the reason.
    """
    return read_shape(read_json(directory / "config.json"))


def load_block(directory: Path, target: TargetShape) -> LoadedBlock:
    """The drafter in a directory, for that target.

    Raises:
        ModelRefusedError: it cannot be read, or does not fit the target, with the reason.
    """
    try:
        return make_block(read_shape_of(directory), read_tensors(directory), target)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{directory}: {error}") from error


def make_block(shape: BlockShape, tensors: Mapping[str, Tensor], target: TargetShape) -> LoadedBlock:
    """The drafter of these tensors for that target.

    Raises:
        ModelRefusedError: they do not fit each other or the target.
    """
    state_layers = shape.states_of(target.num_layers)
    given = {_our_name(name): tensor for name, tensor in tensors.items()}
    _check_target(shape, target, _EMBEDDING in given, _HEAD in given)
    embedding = given.pop(_EMBEDDING, None)
    if embedding is not None:
        check_tensor(_EMBEDDING, embedding, torch.Size((target.vocab_size, shape.hidden_size)))
    num_ids = shape.draft_vocab_size or target.vocab_size
    for name in ("d2t", "t2d"):
        if name in given and len(given[name]) != (num_ids if name == "d2t" else target.vocab_size):
            raise ModelRefusedError(f"{name}: {list(given[name].shape)}: must be as long as its vocabulary")
    given.pop("t2d", None)
    if num_ids < target.vocab_size and "d2t" not in given:
        raise ModelRefusedError(f"d2t: must be there, as draft_vocab_size = {num_ids} of {target.vocab_size} ids")
    ids = target_ids(given.pop("d2t", torch.zeros(num_ids)), target.vocab_size)
    with torch.device("meta"):  # no memory for weights that are replaced
        model = BlockModel(shape, target.vocab_size, _HEAD in given, "confidence_head.proj.bias" in given)
    _check_names(model, given)
    model.load_state_dict(given, assign=True)
    model.rotary = make_rotary(shape)
    model.d2t = ids - torch.arange(num_ids)
    return LoadedBlock(model.eval().requires_grad_(False), embedding, state_layers)


def _check_target(shape: BlockShape, target: TargetShape, has_embedding: bool, has_head: bool) -> None:
    target.check(shape.base, shape.vocab_size or target.vocab_size, shape.draft_vocab_size)
    if shape.target_hidden_size != target.hidden_size:
        raise ModelRefusedError(f"hidden_size: {shape.target_hidden_size}: must be {target.hidden_size}, the target's")
    if shape.mask_token_id >= target.vocab_size:
        raise ModelRefusedError(f"mask_token_id: {shape.mask_token_id}: must be below {target.vocab_size}")
    if shape.hidden_size != target.hidden_size and not (has_embedding and has_head):
        name = _HEAD if has_embedding else _EMBEDDING
        limit = f"must be there, as the target's states are {target.hidden_size} wide, not {shape.hidden_size}"
        raise ModelRefusedError(f"{name}: {limit}")
    if not has_head and 0 < shape.draft_vocab_size < target.vocab_size:
        raise ModelRefusedError(f"{_HEAD}: must be there, as draft_vocab_size = {shape.draft_vocab_size}")
    if shape.selector_rank and 0 < shape.draft_vocab_size < target.vocab_size:
        raise ModelRefusedError(
            f"draft_vocab_size: {shape.draft_vocab_size}: must be {target.vocab_size}, the target's"
        )
    if shape.conv_group_size and shape.hidden_size % shape.conv_group_size:
        raise ModelRefusedError(f"conv_group_size: {shape.conv_group_size}: must divide {shape.hidden_size}")
    if shape.window and not shape.is_causal and target.max_context > shape.window:
        limit = f"must be at least {target.max_context}, the worker's --max-context"
        raise ModelRefusedError(f"sliding_window: {shape.window}: {limit}, as blocks are not causal")


def _check_names(model: BlockModel, given: Mapping[str, Tensor]) -> None:
    expected = model.state_dict()
    if missing := sorted(expected.keys() - given.keys()):
        raise ModelRefusedError(f"{missing[0]} and {len(missing) - 1} more of its weights are not there")
    if unknown := sorted(given.keys() - expected.keys()):
        variant = model.shape.variant
        raise ModelRefusedError(f"{unknown[0]} and {len(unknown) - 1} more are weights that no {variant} drafter has")
    for name, tensor in given.items():
        check_tensor(name, tensor, expected[name].shape)


def _our_name(name: str) -> str:
    for theirs, ours in _OTHER_NAMES.items():
        if name.startswith(theirs) and (theirs.endswith(".") or name == theirs):
            return ours + name[len(theirs) :]
    return name
