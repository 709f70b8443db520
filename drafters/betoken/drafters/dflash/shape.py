"""The form of a block drafter, read from its config.json: z-lab's, DeepSpec's, speculators' or transformers' layout.

It knows names and numbers, not weights. Settings that are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from betoken.drafters.side.config import has_attention_bias, read_base, read_heads, read_integer, read_number, read_rope
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_sizes

_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DFlash2Speculator": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkSpeculator": "dspark",
}
_LAYER_TYPES = ("qwen3", "muse_glimmer_assistant")
_LAYER_KINDS = ("full_attention", "sliding_attention")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Kinds of DSpark's Markov head."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Sizes and flags of one block drafter."""

    variant: str
    """`dflash`, `dflash2` or `dspark`."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Ids of the target; 0 if the config does not state them."""
    draft_vocab_size: int
    """Ids that the drafter can propose; 0 = the target's."""
    target_hidden_size: int
    """Width of the target's states."""
    max_context: int
    """Positions the drafter was made for, tokens."""
    block_size: int
    """Tokens of a block, the last committed one included."""
    mask_token_id: int
    state_layers: tuple[int, ...] | None = None
    """Target states it reads, as entries of `output_hidden_states`; None = the default, see `states_of`."""
    predicts_first: bool = False
    """Whether the first token of the block predicts, too; else the first mask predicts the first token."""
    is_causal: bool = False
    """Whether tokens of the block see earlier ones only."""
    window: int = 0
    """Visible positions of every layer, 0 = all."""
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """RoPE parameters in the names of transformers."""
    has_attention_bias: bool = False
    output_multiplier: float = 1.0
    """Factor on the logits."""
    softcap: float = 0.0
    """Bound of the logits, 0 = none."""
    conv_kernel_size: int = 0
    """Taps of DFlash 2's convolutions."""
    conv_group_size: int = 0
    """Channels that share the dynamic part of a tap."""
    selector_rank: int = 0
    """Width of DFlash 2's codebooks."""
    selector_top_k: int = 0
    """Candidates of a position."""
    markov_rank: int = 0
    """Width of DSpark's Markov head, 0 = none."""
    markov_head_type: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    """Whether the confidence head reads the previous token, too."""
    base: str = ""
    """Name of the target it was made for; empty = it does not say."""

    @property
    def num_predicted(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size if self.predicts_first else self.block_size - 1

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """The target states it reads of a target of `num_layers` layers.

        Entry `num_layers` is the last one, after the final norm.

        Raises:
            ModelRefusedError: the target has no such layer.
        """
        layers = self.state_layers
        if layers is None:
            last = max(1, self.num_layers - 1)
            layers = tuple(round(1 + i * (num_layers - 4) / last) + 1 for i in range(self.num_layers))
        if not all(0 <= layer <= num_layers for layer in layers):
            raise ModelRefusedError(
                f"target_layer_ids: {[layer - 1 for layer in layers]}: must be among -1 to {num_layers - 1}"
            )
        return layers


def read_shape(config: Mapping[str, Any]) -> BlockShape:
    """The shape described by a config.json.

    Raises:
        ModelRefusedError: a field is missing, or asks for what is not supported.
    """
    check_sizes(config)
    variant = _variant(config)
    layer = _object(config, "transformer_layer_config", config)
    own = {**config, **_object(config, "dflash_config", {})}
    _check_layer(layer, own)
    hidden_size = read_integer(layer, "hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(layer)
    vocab_size = 0 if layer.get("vocab_size") is None else read_integer(layer, "vocab_size")
    is_causal, window = _visible(config, layer)
    predicts_first = own.get("sample_from_anchor")
    return BlockShape(
        variant=variant,
        hidden_size=hidden_size,
        intermediate_size=read_integer(layer, "intermediate_size"),
        num_layers=read_integer(layer, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=0 if config.get("draft_vocab_size") is None else read_integer(config, "draft_vocab_size"),
        target_hidden_size=read_integer(config, "target_hidden_size", hidden_size),
        max_context=read_integer(layer, "max_position_embeddings", 2048),
        block_size=read_integer(own, "block_size", 16, least=2),
        mask_token_id=read_integer(own, "mask_token_id", least=0),
        state_layers=_state_layers(config, own),
        predicts_first=variant == "dspark" if predicts_first is None else bool(predicts_first),
        is_causal=is_causal,
        window=window,
        rms_norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
        rope=read_rope(layer),
        has_attention_bias=has_attention_bias(layer),
        output_multiplier=read_number(own, "output_multiplier", 1.0),
        softcap=read_number(own, "final_logit_softcapping", 0.0) if own.get("final_logit_softcapping") else 0.0,
        base=read_base(config),
        **_variant_fields(variant, own),
    )


def _variant(config: Mapping[str, Any]) -> str:
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in ("dflash", "dflash2", "dspark"):
            raise ModelRefusedError(f"speculators_model_type: {kind!r}: must be 'dflash', 'dflash2' or 'dspark'")
        return str(kind)
    given = config.get("architectures")
    name = given[0] if isinstance(given, list) and given else None
    if name is not None and (type(name) is not str or name not in _ARCHITECTURES):
        raise ModelRefusedError(f"architectures: {name!r}: must be one of {', '.join(_ARCHITECTURES)}")
    return "dflash" if name is None else _ARCHITECTURES[name]


def _variant_fields(variant: str, own: Mapping[str, Any]) -> dict[str, Any]:
    if variant == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        return {name: read_integer(own, name) for name in names}
    if variant == "dspark":
        kind = own.get("markov_head_type") or "vanilla"
        if kind not in MARKOV_HEADS:
            raise ModelRefusedError(f"markov_head_type: {kind!r}: must be one of {', '.join(MARKOV_HEADS)}")
        rank = read_integer(own, "markov_rank", 0, least=0)
        reads_markov = bool(own.get("confidence_head_with_markov", False))
        if reads_markov and not rank:
            raise ModelRefusedError(f"confidence_head_with_markov: {reads_markov}: must be false without markov_rank")
        return {
            "markov_rank": rank,
            "markov_head_type": kind,
            "has_confidence": bool(own.get("enable_confidence_head", False)),
            "confidence_reads_markov": reads_markov,
        }
    return {}


def _check_layer(layer: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if (model_type := layer.get("model_type", "qwen3")) not in _LAYER_TYPES:
        raise ModelRefusedError(f"model_type: {model_type!r}: must be one of {', '.join(_LAYER_TYPES)}")
    if (act := layer.get("hidden_act", "silu")) != "silu":
        raise ModelRefusedError(f"hidden_act: {act!r}: must be 'silu'")
    if layer.get("quantization_config") or own.get("quantization_config"):
        raise ModelRefusedError("quantization_config: must be absent, the layers' weights are read dense")
    if (kind := own.get("projector_type", "dflash")) != "dflash":
        raise ModelRefusedError(f"projector_type: {kind!r}: must be 'dflash'")
    if own.get("shift_label"):
        raise ModelRefusedError("shift_label: must be false")
    if (scale := own.get("input_embedding_scale")) not in (None, 1, 1.0):
        raise ModelRefusedError(f"input_embedding_scale: {scale!r}: must be 1")


def _visible(config: Mapping[str, Any], layer: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether a block is causal, and the window of the layers; both must be the same in all layers."""
    kinds = layer.get("layer_types") or ["full_attention"]
    if layer.get("model_type") == "muse_glimmer_assistant" and not layer.get("layer_types"):
        kinds = ["sliding_attention"]
    if not isinstance(kinds, Sequence) or any(kind not in _LAYER_KINDS for kind in kinds) or len(set(kinds)) != 1:
        raise ModelRefusedError(f"layer_types: {kinds!r}: must be full_attention or sliding_attention for all layers")
    own = _object(config, "dflash_config", {})
    is_sliding = kinds[0] == "sliding_attention" or bool(own.get("use_swa"))
    is_causal = own.get("causal", config.get("is_causal"))
    if is_causal is None:
        is_causal = is_sliding and layer.get("model_type") != "muse_glimmer_assistant"
        if "speculators_model_type" in config:
            is_causal = is_sliding and not config.get("sliding_window_non_causal", False)
    if not is_sliding:
        return bool(is_causal), 0
    if own.get("swa_window_size"):
        return bool(is_causal), read_integer(own, "swa_window_size")
    default = 2048 if layer.get("model_type") == "muse_glimmer_assistant" else None
    return bool(is_causal), read_integer(layer, "sliding_window", default)


def _state_layers(config: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Entries of `output_hidden_states`; `target_layer_ids` counts layers, whose outputs are one entry later."""
    name = "aux_hidden_state_layer_ids" if "speculators_model_type" in config else "target_layer_ids"
    given = own.get(name)
    if given is None and name == "target_layer_ids":
        return None
    if not isinstance(given, list) or not given or not all(type(layer) is int for layer in given):
        raise ModelRefusedError(f"{name}: {given!r}: must be a list of layers")
    return tuple(layer + (name == "target_layer_ids") for layer in given)


def _object(config: Mapping[str, Any], name: str, default: Mapping[str, Any]) -> Mapping[str, Any]:
    value = config.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise ModelRefusedError(f"{name}: must be an object")
    return default if value is None else value
