"""Reads a Gemma-4 assistant from a directory in the published layout.

An assistant of another width or vocabulary than the target's is refused by name, as is a file that holds too little or
too much. Knows files and names, not how layers are run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from betoken.drafters.gemma4_assistant.module import AssistantModel
from betoken.drafters.gemma4_assistant.shape import AssistantShape, read_shape, refusal_of
from betoken.drafters.side.files import TargetShape, check_tensor, read_json, read_tensors
from betoken.engine.errors import ModelRefusedError

_ORDERING = "masked_embedding.token_ordering"
_HEAD = "lm_head.weight"


def load_assistant(directory: Path, target: TargetShape, dtype: torch.dtype) -> AssistantModel:
    """The assistant in a directory, for that target, on the CPU.

    Raises:
        ModelRefusedError: it cannot be read, or does not fit the target, with the reason.
    """
    try:
        shape = read_shape(read_json(directory / "config.json"))
        _check_target(shape, target)
        return _make(shape, read_tensors(directory), dtype)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{directory}: {error}") from error


def _check_target(shape: AssistantShape, target: TargetShape) -> None:
    target.check("", shape.text.vocab_size, shape.text.vocab_size)
    if shape.target_hidden_size != target.hidden_size:
        limit = f"must be {target.hidden_size}, the target's hidden_size"
        raise ModelRefusedError(f"backbone_hidden_size: {shape.target_hidden_size}: {limit}")


def _make(shape: AssistantShape, tensors: dict[str, Tensor], dtype: torch.dtype) -> AssistantModel:
    given = dict(tensors)
    given.pop(_HEAD, None)  # a copy of the embeddings, to which it is tied
    ordering = _token_ordering(given.pop(_ORDERING, None), shape)
    try:
        with torch.device("meta"):  # no memory for weights that are replaced
            model = AssistantModel(shape)
    except Exception as error:
        raise refusal_of(error) from error
    expected = model.state_dict()
    if missing := sorted(expected.keys() - given.keys()):
        raise ModelRefusedError(f"{missing[0]} and {len(missing) - 1} more of its weights are not there")
    if unknown := sorted(given.keys() - expected.keys()):
        raise ModelRefusedError(f"{unknown[0]} and {len(unknown) - 1} more are weights that the assistant does not use")
    for name, tensor in given.items():
        check_tensor(name, tensor, expected[name].shape)
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in given.items()}, assign=True)
    model.complete(ordering)
    return model.eval().requires_grad_(False)


def _token_ordering(stored: Tensor | None, shape: AssistantShape) -> Tensor | None:
    """[V] ids by centroid; None without ordered embeddings."""
    vocab_size = shape.text.vocab_size
    if not shape.num_centroids:
        if stored is not None:
            raise ModelRefusedError(f"{_ORDERING}: must be absent, as use_ordered_embeddings is false")
        return None
    if stored is None:
        raise ModelRefusedError(f"{_ORDERING}: must be there, as use_ordered_embeddings is true")
    if stored.shape != (vocab_size,) or stored.is_floating_point() or stored.is_complex():
        raise ModelRefusedError(f"{_ORDERING}: {list(stored.shape)}: must be [{vocab_size}] integers")
    ordering = stored.to(torch.int64)
    if not torch.equal(ordering.sort().values, torch.arange(vocab_size)):
        raise ModelRefusedError(f"{_ORDERING}: must hold each id below {vocab_size} once")
    return ordering
