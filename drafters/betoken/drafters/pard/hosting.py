"""Makes the drafter for a target: checks the PARD checkpoint, and loads it next to the target.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betoken.drafters.model import drafter_of
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.pard.settings import PardSettings
from betoken.drafters.side.config import read_heads, read_integer
from betoken.drafters.side.files import read_json
from betoken.drafters.side.weights import SideWeights
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.mask_token import mask_token_of

_NAME = "pard"
_WEIGHTS = SideWeights(_NAME)


@dataclass(frozen=True, slots=True)
class PardShape:
    """Sizes of the model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


def memory_of(settings: Any) -> Memory:
    """See `SideWeights`.

    Raises:
        FailedPreconditionError: the checkpoint cannot be read, or is not a PARD model.
    """
    return _WEIGHTS.memory(settings, read_shape)


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
    return PardShape(read_integer(layers, "num_hidden_layers"), num_kv_heads, head_dim)


def make_drafter(host: DrafterContext) -> ModelDrafter:
    """The drafter of the settings' model for the host's target.

    Raises:
        FailedPreconditionError: the model cannot be served, or has another tokenizer; the text names the option.
    """
    drafter = drafter_of(host, _NAME, _NAME, settings=PardSettings())
    runner, _ = host.model(_NAME)
    hashes = [info.tokenizer_hash for info in (runner.info, host.target.info)]
    if all(hashes) and hashes[0] != hashes[1]:
        error = ModelRefusedError("tokenizer.json: must be the target's")
        raise _WEIGHTS.refusal(host.settings, error)
    return drafter
