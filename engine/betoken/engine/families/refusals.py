"""Reasons that rule a model out before it runs: its configuration, and its layers' demands on attention."""

import sys
from collections.abc import Mapping
from typing import Any

from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import family_of

_MAKERS_OF_WINDOWS = ("create_sliding_window_causal_mask", "create_masks_for_generate")
"""Names that a model's file imports from transformers to make windowed masks."""

_TABLE_OF_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""Names that a model's file imports from transformers to look up attention by name."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse", "mlp"})
"""Types of layers whose tokens are mixed by full or sliding attention, or not at all."""


def check_layers(config: Any) -> None:
    """Refuse kinds of layers that no length of context makes fit.

    Args:
        config: the text configuration of a transformers model.

    Raises:
        ModelRefusedError: with the reason.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError("encoder-decoder models are not supported")
    model_type = getattr(config, "model_type", "")
    family = family_of(model_type)
    if reason := family.refusal or family.find_fault(config):
        raise ModelRefusedError(f"{model_type}: {reason}")
    served = _LAYER_TYPES | family.layer_types
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in served:
            raise ModelRefusedError(f"layer type {layer_type!r} is neither full nor sliding attention")


def check_code(model_class: Any, model_type: str = "") -> None:
    """Reject a model whose attention is custom code, or absent: ours could not replace it.

    Raises:
        ModelRefusedError: with the reason.
    """
    file = sys.modules[model_class.__module__]
    family = family_of(model_type)
    if family.layer_types or family.has_own_attention:
        return  # a model may have no attention at all; what it has is found at the first forward
    if not getattr(model_class, "_supports_attention_backend", True) and not hasattr(file, _TABLE_OF_ATTENTION):
        raise ModelRefusedError(
            f"{model_class.__name__}: its code does not use the attention interface of transformers"
        )


def check_windows(model: Any, windows: Mapping[int, int], max_context: int) -> None:
    """Reject layers that leave their window to the mask, which is not made here, or that report another one.

    Args: model: a model of transformers. windows: layer -> number of visible positions by its attention, 0 = all.
    max_context: longest sequence that will be served, tokens; a window of that length has no effect.

    Raises:
        ModelRefusedError: with the reason.
    """
    if family_of(model.config.model_type).has_own_attention:
        return
    config, makes_windows = model.config.get_text_config(decoder=True), _makes_windows(model)
    window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    for layer, told in windows.items():
        slides = makes_windows and (not layer_types or layer_types[layer] == "sliding_attention")
        masked = window or 0 if slides else 0
        if min(told or max_context, max_context) != min(masked or max_context, max_context):
            raise ModelRefusedError(
                f"layer {layer} passes its attention a window of {told} positions (0: none), its mask has one of"
                f" {masked}: set max_context to {min(told or masked, masked or told)} or less"
            )


def _makes_windows(model: Any) -> bool:
    """Whether the model's code makes masks with windows; otherwise its configuration names one for nothing."""
    files = [sys.modules[name] for name in {type(module).__module__ for module in model.modules()}]
    return any(hasattr(file, maker) for file in files for maker in _MAKERS_OF_WINDOWS)
