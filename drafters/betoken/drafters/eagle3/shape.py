"""The form of a draft layer of the EAGLE family, read from its config.json: SafeAILab's, SpecForge's, speculators'.

It knows names and numbers, not weights. Whatever the files say that is not honoured here is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from betoken.drafters.side.config import has_attention_bias, read_base, read_heads, read_integer, read_number, read_rope
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_sizes

_LAYER_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with the decoder layer that is built here."""

_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes and flags of one draft layer."""

    version: int
    """3, or 1 for the weights of EAGLE-1 and EAGLE-2."""
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Ids of the target."""
    draft_vocab_size: int
    """Ids that the layer can propose."""
    target_hidden_size: int
    """Width of the target's states."""
    max_context: int
    """Positions the layer was made for, tokens."""
    rms_norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    """RoPE parameters in the names of transformers."""
    state_layers: tuple[int, ...] | None = None
    """Target states it reads, as entries of `output_hidden_states`; None = the paper's, see `states_of`."""
    num_layers: int = 1
    """Decoder layers; more than one only in parallel drafters."""
    mask_token_id: int | None = None
    """Token of positions that are drafted in parallel (P-EAGLE); None = the layer drafts one token in a pass."""
    num_states: int = 3
    """Target states that are read for one position."""
    has_attention_bias: bool = False
    """Whether query, key and value projections have a bias."""
    has_qk_norm: bool = False
    """Whether queries and keys are normed per head, as Qwen3's are."""
    has_fc_bias: bool = False
    norm_before_residual: bool = False
    """Whether the residual is the normed state."""
    norm_before_fc: bool = False
    """Whether the states are normed together before they are fused."""
    fc_norm: bool = False
    """Whether each state is normed by itself before they are fused (EAGLE-3.1)."""
    norm_output: bool = False
    """Whether what is fed back is the normed output (EAGLE-3.1)."""
    base: str = ""
    """Name of the target it was made for; empty = it does not say."""

    def states_of(self, num_layers: int) -> tuple[int, ...]:
        """The target states it reads of a target of `num_layers` layers, low to high.

        Entry `num_layers` is the last one, after the final norm.

        Raises:
            ModelRefusedError: the target has no such layer.
        """
        if self.version == 1:
            return (num_layers,)
        layers = self.state_layers or (2, num_layers // 2, num_layers - 3)
        if len(layers) != self.num_states or not all(0 <= layer <= num_layers for layer in layers):
            limit = f"must be {self.num_states} of 0 to {num_layers}, the target's layers"
            raise ModelRefusedError(f"eagle_aux_hidden_state_layer_ids: {list(layers)}: {limit}")
        return layers


def read_shape(config: Mapping[str, Any], version: int) -> EagleShape:
    """The shape described by a config.json; the weights determine `version`.

    Raises:
        ModelRefusedError: a field is missing, or asks for what is not supported.
    """
    check_sizes(config)
    _check_kind(config)
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise ModelRefusedError("transformer_layer_config: must be an object")
    hidden_size = read_integer(layer, "hidden_size")
    num_heads, num_kv_heads, head_dim = read_heads(layer)
    vocab_size = read_integer(layer, "vocab_size")
    states = _state_layers(config)
    return EagleShape(
        version=version,
        hidden_size=hidden_size,
        intermediate_size=read_integer(layer, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=read_integer(config, "draft_vocab_size", vocab_size),
        target_hidden_size=read_integer(config, "target_hidden_size", hidden_size),
        max_context=read_integer(layer, "max_position_embeddings", 2048),
        rms_norm_eps=read_number(layer, "rms_norm_eps", 1e-6),
        rope=read_rope(layer),
        state_layers=states,
        num_layers=read_integer(layer, "num_hidden_layers", 1),
        mask_token_id=_mask_token_id(config),
        num_states=1 if version == 1 else len(states or (0, 0, 0)),
        has_attention_bias=has_attention_bias(layer),
        has_qk_norm=layer.get("model_type") == "qwen3",
        has_fc_bias=version == 1 and config.get("bias", True) is not False,
        base=read_base(config),
        **{flag: bool(config.get(flag, False)) for flag in _FLAGS if version == 3},
    )


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3", "peagle"):
        raise ModelRefusedError(f"speculators_model_type: {kind!r}: must be 'eagle3' or 'peagle'")
    for name in config.get("architectures") or ():
        if "eagle4" in str(name).lower():
            raise ModelRefusedError(f"architectures: {name!r}: EAGLE-4 is not supported, EAGLE-3 and before are")
    layer = config.get("transformer_layer_config", config)
    if isinstance(layer, Mapping):
        if (model_type := layer.get("model_type", "llama")) not in _LAYER_TYPES:
            raise ModelRefusedError(f"model_type: {model_type!r}: must be one of {', '.join(_LAYER_TYPES)}")
        if layer.get("num_hidden_layers", 1) != 1 and not _is_parallel(config):
            raise ModelRefusedError(f"num_hidden_layers: {layer['num_hidden_layers']!r}: must be 1")
        if (act := layer.get("hidden_act", "silu")) != "silu":
            raise ModelRefusedError(f"hidden_act: {act!r}: must be 'silu'")
        if layer.get("mlp_bias"):
            raise ModelRefusedError("mlp_bias: must be false")
        types = layer.get("layer_types") or ["full_attention"]
        if set(types) != {"full_attention"} or layer.get("use_sliding_window"):
            raise ModelRefusedError("layer_types: must be full attention")
        if layer.get("quantization_config") or config.get("quantization_config"):
            raise ModelRefusedError("quantization_config: must be absent, the layer's weights are read dense")
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise ModelRefusedError("eagle_config.use_aux_hidden_state: must be true")


def _is_parallel(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == "peagle" or bool(
        config.get("parallel_drafting") or config.get("mask_hidden") or config.get("ptd_token_id") is not None
    )


def _mask_token_id(config: Mapping[str, Any]) -> int | None:
    if not _is_parallel(config):
        return None
    name = "mask_token_id" if config.get("mask_token_id") is not None else "ptd_token_id"
    return read_integer(config, name, least=0)


def _state_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    name = "eagle_aux_hidden_state_layer_ids"
    given = config.get(name) or (config.get("eagle_config") or {}).get(name)
    if given is None:
        return None
    if not isinstance(given, list) or not given or not all(type(layer) is int for layer in given):
        raise ModelRefusedError(f"{name}: {given!r}: must be a list of layers")
    return tuple(given)
