"""Makes the drafter for a target: checks the PARD checkpoint, and loads it next to the target.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.pard.drafter import FeaturePardDrafter
from betoken.drafters.pard.settings import PardSettings
from betoken.drafters.pard.target_features import FILE, TargetFeatures, features_of, load_projection
from betoken.drafters.side.config import read_heads, read_integer
from betoken.drafters.side.files import read_json
from betoken.drafters.side.weights import SideWeights, columns_of, itemsize_of
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.kv_pool import LayerShape
from betoken.engine.weights.mask_token import mask_token_of
from betoken.engine.weights.sources import open_source

_LOG = logging.getLogger(__name__)
_NAME = "pard"
_WEIGHTS = SideWeights(_NAME, (FILE,))


@dataclass(frozen=True, slots=True)
class PardShape:
    """Sizes of the model's KV, and the target's states that it can read."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    features: TargetFeatures | None
    """None if the checkpoint reads none."""


def memory_of(settings: Any) -> Memory:
    """See `SideWeights`. The vectors of each position of a PARD-2 model count with its KV.

    Raises:
        FailedPreconditionError: the checkpoint cannot be read, or is not a PARD model.
    """
    memory = _WEIGHTS.memory(settings, read_shape)
    directory, shape = _read(settings)
    if shape.features is None:
        return memory
    vectors = LayerShape(1, shape.hidden_size, 0).page_bytes(settings.page_size + 1, itemsize_of(settings))
    return Memory(memory.weight_bytes + (directory / FILE).stat().st_size, memory.page_bytes + vectors)


def state_layers(settings: Any, num_layers: int) -> tuple[int, ...]:
    """States of a target with so many layers that the checkpoint reads; none if it reads none or was made for another
    target.

    Raises:
        FailedPreconditionError: the checkpoint or the target's configuration cannot be read.
    """
    features = _read(settings)[1].features
    if features is None:
        return ()
    try:
        config = open_source(settings.model, settings.revision).config().get_text_config(decoder=True)
    except Exception as error:  # whatever the files' contents make transformers raise
        raise FailedPreconditionError(f"--model = {settings.model}: {error}") from error
    return _states(settings, features, num_layers, config.hidden_size)


def make_drafter(host: DrafterContext) -> ModelDrafter:
    """The drafter of the settings' model for the host's target.

    Raises:
        FailedPreconditionError: the model cannot be served, or has another tokenizer; the text names the option.
    """
    settings, target = host.settings, host.target
    directory, shape = _read(settings)
    states: tuple[int, ...] = ()
    if (features := shape.features) is not None:
        states = _states(settings, features, target.parts.num_layers, target.parts.hidden_size)
    runner, pages = host.model(_NAME, adds_to_embeddings=bool(states))
    mask_token_id = runner.info.mask_token_id
    max_rows = settings.max_num_batched_tokens
    arguments = (runner, max_rows, host.max_prefill_tokens, _NAME, PardSettings(), pages, mask_token_id)
    try:
        hashes = [info.tokenizer_hash for info in (runner.info, target.info)]
        if all(hashes) and hashes[0] != hashes[1]:
            raise ModelRefusedError("tokenizer.json: must be the target's")
        if features is None or not states:
            return ModelDrafter(*arguments)
        project = load_projection(directory, features, runner.parts)
    except ModelRefusedError as error:
        raise _WEIGHTS.refusal(settings, error) from error
    _LOG.info("%s reads hidden states %s of the target (PARD-2)", _NAME, list(states))
    return FeaturePardDrafter(*arguments, project=project, state_columns=columns_of(states))


def _read(settings: Any) -> tuple[Path, PardShape]:
    """Directory and shape of the settings' model.

    Raises:
        FailedPreconditionError: see `read_shape`; the text names the option.
    """
    try:
        directory = _WEIGHTS.directory(settings)
        return directory, read_shape(directory)
    except ModelRefusedError as error:
        raise _WEIGHTS.refusal(settings, error) from error


def _states(settings: Any, features: TargetFeatures, num_layers: int, hidden_size: int) -> tuple[int, ...]:
    """The states of a target that are read; none, with a warning, if it has no such states."""
    states = features.states_of(num_layers, hidden_size)
    if not states:
        wanted = f"hidden states {list(features.layers)} of {features.dim} numbers in all"
        found = f"the target has {num_layers} layers of {hidden_size}"
        _LOG.warning("--pard = %s: drafts as PARD without hidden states: needs %s, %s", settings.pard, wanted, found)
    return states


def read_shape(directory: Path) -> PardShape:
    """The shape of the PARD model in a directory.

    Raises:
        ModelRefusedError: it is not a PARD model; the text names the field of config.json.
    """
    described = read_json(directory / "config.json")
    layers = described.get("text_config", described)
    vocab_size = read_integer(layers, "vocab_size")
    if mask_token_of(described, vocab_size) is None:
        raise ModelRefusedError(f"pard_token: is missing, an id below {vocab_size} is needed")
    _, num_kv_heads, head_dim = read_heads(layers)
    hidden_size = read_integer(layers, "hidden_size")
    num_layers = read_integer(layers, "num_hidden_layers")
    features = features_of(described)
    if features is not None and not (directory / FILE).is_file():
        raise ModelRefusedError(f"{FILE}: is missing, the projection of a PARD-2 checkpoint")
    return PardShape(num_layers, num_kv_heads, head_dim, hidden_size, features)
