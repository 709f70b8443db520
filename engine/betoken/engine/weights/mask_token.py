"""Mask token of a PARD checkpoint: a causal model that predicts several tokens in one forward.

Source: PARD, An et al., arXiv:2504.18583, and the configs of its checkpoints; PARD-2, arXiv:2605.08632.
"""

from collections.abc import Mapping
from typing import Any

from betoken.engine.errors import ModelRefusedError

_FIELD = "pard_token"
_TYPES = ("pard", "pard2")


def mask_token_of(config: Mapping[str, Any], vocab_size: int) -> int | None:
    """Return the mask token that a config.json names; None if the checkpoint is not a PARD drafter.

    PARD-2 checkpoints may read hidden states of a target in addition; without those states they are PARD drafters.

    Raises:
        ModelRefusedError: the id is not in the vocabulary, or the config contradicts itself.
    """
    token_id, kind = config.get(_FIELD), config.get("spd_type")
    if token_id is not None and kind is not None and kind not in _TYPES:
        raise ModelRefusedError(f"spd_type: {kind!r} is not one of {', '.join(_TYPES)}")
    if token_id is None:
        if kind in _TYPES or config.get("pard2"):
            raise ModelRefusedError(f"{_FIELD}: is missing, an id below {vocab_size} is needed")
        return None
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise ModelRefusedError(f"{_FIELD}: {token_id!r} is not an integer in [0, {vocab_size})")
    return token_id
