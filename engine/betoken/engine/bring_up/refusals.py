"""Reasons that rule a model out before it runs: its configuration, and its layers' demands on attention."""

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from betoken.engine.errors import ModelRefusedError
from betoken.engine.mixers.own_attention import FAMILIES as OWN_ATTENTION
from betoken.engine.mixers.own_attention import check_own_attention

_MAKERS_OF_WINDOWS = ("create_sliding_window_causal_mask", "create_masks_for_generate")
"""Names that a model's file imports from transformers to make windowed masks."""

_TABLE_OF_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
"""Names that a model's file imports from transformers to look up attention by name."""

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse", "mlp"})

_MIXING: dict[str, frozenset[str]] = {
    "llama4_text": frozenset({"chunked_attention"}),
    "lfm2": frozenset({"conv"}),
    "lfm2_moe": frozenset({"conv"}),
    "lfm3": frozenset({"conv"}),
    "qwen3_next": frozenset({"linear_attention"}),
    "qwen3_5_text": frozenset({"linear_attention"}),
    "qwen3_5_moe_text": frozenset({"linear_attention"}),
    "olmo_hybrid": frozenset({"linear_attention"}),
    "kimi_linear": frozenset({"linear_attention"}),
    "bailing_hybrid": frozenset({"linear_attention"}),
    "mamba2": frozenset({"mamba", "mamba2", "linear_attention"}),
    "bamba": frozenset({"mamba", "linear_attention"}),
    "granitemoehybrid": frozenset({"mamba", "linear_attention"}),
    "falcon_h1": frozenset({"mamba", "hybrid", "linear_attention"}),
    "nemotron_h": frozenset({"mamba", "moe", "linear_attention"}),
    "zamba2": frozenset({"mamba", "hybrid", "linear_attention"}),
    "zamba": frozenset({"mamba", "hybrid", "linear_attention"}),
    "jamba": frozenset({"mamba", "linear_attention"}),
    "mamba": frozenset({"mamba", "linear_attention"}),
    "falcon_mamba": frozenset({"mamba", "linear_attention"}),
    "minimax": frozenset({"linear_attention"}),
    "recurrent_gemma": frozenset({"linear_attention"}),
}
"""Model type -> types of its layers that mix tokens other than by attention, in ways that `mixers` knows."""

_OTHER_MIXERS = {
    "rwkv": "its state is divided by a separate sum of exponentials",
    "xlstm": "its state is scaled by a separate maximum",
    "inkling_text": "a layer convolves keys, values and outputs, and its attention adds logits of distances",
    "inkling2_text": "a layer convolves keys, values and outputs, and its attention adds logits of distances",
    "qwen4_exp_text": "its attention reads positions selected by a separate index",
}
"""Model type -> in what its layers differ from those that `mixers` knows."""


def check_layers(config: Any) -> None:
    """Refuse kinds of layers that no length of context makes fit.

    Args:
        config: the text configuration of a transformers model.

    Raises:
        ModelRefusedError: with the reason.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError("encoder-decoder models are not supported")
    check_own_attention(config)
    model_type = getattr(config, "model_type", "")
    if reason := _OTHER_MIXERS.get(model_type):
        raise ModelRefusedError(f"{model_type}: {reason}")
    served = _LAYER_TYPES | _MIXING.get(model_type, frozenset())
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in served:
            raise ModelRefusedError(f"layer type {layer_type!r} is neither full nor sliding attention")


def check_code(model_class: Any, model_type: str = "") -> None:
    """Reject a model whose attention is custom code, or absent: ours could not replace it.

    Raises:
        ModelRefusedError: with the reason.
    """
    file = sys.modules[model_class.__module__]
    if model_type in _MIXING or model_type in OWN_ATTENTION:
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
    if model.config.model_type in OWN_ATTENTION:
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


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The one rope description of a model, or one per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        nested = [entry for entry in given.values() if isinstance(entry, dict)]
        yield from nested or [given]
