"""Makes the drafter for a target: finds the assistant's files and checks them against the target.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from typing import Any

from betoken.drafters.gemma4_assistant.checkpoint import load_assistant
from betoken.drafters.gemma4_assistant.drafter import Gemma4AssistantDrafter
from betoken.drafters.gemma4_assistant.forward import AssistantForward
from betoken.drafters.gemma4_assistant.settings import Gemma4AssistantSettings
from betoken.drafters.gemma4_assistant.shape import TARGET_TYPES, AssistantShape
from betoken.drafters.side.files import TargetShape
from betoken.drafters.side.weights import SideWeights
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.parts import ModelParts

_WEIGHTS = SideWeights("gemma4_assistant")


def memory_of(settings: Any) -> Memory:
    """See `SideWeights`; the assistant has no KV."""
    return _WEIGHTS.memory(settings)


def make_drafter(host: DrafterContext) -> Gemma4AssistantDrafter:
    """The drafter of the settings' assistant for the host's target.

    Raises:
        FailedPreconditionError: it cannot be read, or does not fit; the text names the option.
    """
    settings, parts, info = host.settings, host.target.parts, host.target.info
    fits = TargetShape(info.model_id, info.vocab_size, parts.hidden_size, parts.num_layers)
    try:
        if (kind := parts.config.model_type) not in TARGET_TYPES:
            raise ModelRefusedError(f"model_type: {kind!r}: must be one of {', '.join(TARGET_TYPES)}, for the target")
        model = load_assistant(_WEIGHTS.directory(settings), fits, parts.dtype)
        forward = AssistantForward(model, parts, _target_layers(model.shape, parts))
    except ModelRefusedError as error:
        raise _WEIGHTS.refusal(settings, error) from error
    return Gemma4AssistantDrafter(forward, Gemma4AssistantSettings.of_options(settings))


def _target_layers(shape: AssistantShape, parts: ModelParts) -> dict[str, int]:
    """The last layer of each kind of attention that makes keys in the target.

    Raises:
        ModelRefusedError: there is none, or its heads differ from the assistant's.
    """
    num_shared = getattr(parts.config, "num_kv_shared_layers", 0) or 0
    last = {kind: layer for layer, kind in enumerate(parts.config.layer_types[: parts.num_layers - num_shared])}
    found = {}
    for kind in dict.fromkeys(shape.layer_types):
        if kind not in last:
            raise ModelRefusedError(f"layer_types: {kind!r}: must be one of the target's, {', '.join(last)}")
        found[kind] = last[kind]
        assert parts.pool is not None, "the target has no KV"
        _, _, num_heads, head_dim = parts.pool.keys[last[kind]].shape
        shape.check_target(kind, num_heads, head_dim)
    return found
