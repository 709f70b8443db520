"""The form of a Gemma-4 assistant, read from its config.json in the published layout.

It knows names and numbers, not weights. Settings that are not supported are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING

from betoken.drafters.side.config import read_integer
from betoken.engine.attention import ATTENTION_NAME
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.plausible import check_sizes

_TEXT_TYPES = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
TARGET_TYPES = tuple(_TEXT_TYPES.values())
"""Model types of language models that have assistants."""
_ROPE_TYPES = ("default", "linear", "proportional", "llama3", "yarn")
"""Kinds of rotary frequencies that do not depend on the length of the text."""
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_size_per_layer_input": (0,),
    "enable_moe_block": (False, None),
    "use_double_wide_mlp": (False, None),
    "attention_bias": (False, None),
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "use_bidirectional_attention": (None, "vision", None),
    "quantization_config": (None,),
}
"""Fields of text_config, and their supported values."""


@dataclass(frozen=True, slots=True)
class AssistantShape:
    """Sizes and flags of one assistant."""

    text: Any
    """Configuration of its layers, of the type of transformers."""
    target_hidden_size: int
    """Width of the target's states."""
    num_centroids: int
    """Groups of ids of ordered embeddings; 0 = all ids are scored."""
    top_centroids: int
    """Groups whose ids are scored."""

    @property
    def layer_types(self) -> list[str]:
        """Kind of attention of each layer."""
        kinds: list[str] = self.text.layer_types
        return kinds

    def check_target(self, layer_type: str, num_kv_heads: int, head_dim: int) -> None:
        """Check that the layers of a kind can read keys of the target.

        Raises:
            ModelRefusedError: the heads differ.
        """
        own = self.text.per_layer_config[layer_type]
        for name, expected in (("num_key_value_heads", num_kv_heads), ("head_dim", head_dim)):
            if (value := getattr(own, name)) != expected:
                raise ModelRefusedError(f"{name}: {value}: must be {expected}, as in the target's {layer_type} layers")
        if self.text.num_attention_heads % num_kv_heads:
            limit = f"must be a multiple of {num_kv_heads}, the target's key heads in {layer_type} layers"
            raise ModelRefusedError(f"num_attention_heads: {self.text.num_attention_heads}: {limit}")


def read_shape(config: Mapping[str, Any]) -> AssistantShape:
    """The shape described by a config.json.

    Raises:
        ModelRefusedError: a field is missing, or its value is not supported.
    """
    check_sizes(config)
    text = _read_text(config)
    num_centroids = top_centroids = 0
    if config.get("use_ordered_embeddings"):
        num_centroids = read_integer(config, "num_centroids", 2048)
        top_centroids = read_integer(config, "centroid_intermediate_top_k", 32)
        if text.vocab_size % num_centroids:
            raise ModelRefusedError(f"num_centroids: {num_centroids}: must divide vocab_size = {text.vocab_size}")
        if top_centroids > num_centroids:
            limit = f"must be at most num_centroids = {num_centroids}"
            raise ModelRefusedError(f"centroid_intermediate_top_k: {top_centroids}: {limit}")
    if (tied := config.get("tie_word_embeddings", True)) is not True:
        raise ModelRefusedError(f"tie_word_embeddings: {tied!r}: must be true, the head is the embedding")
    target_hidden_size = read_integer(config, "backbone_hidden_size")
    return AssistantShape(text, target_hidden_size, num_centroids, top_centroids)


def _read_text(config: Mapping[str, Any]) -> Any:
    """The configuration of the layers, as of layers that write keys: transformers 5.23 makes no model whose layers all
    read shared keys."""
    kind = config.get("model_type")
    if type(kind) is not str or kind not in _TEXT_TYPES:
        raise ModelRefusedError(f"model_type: {kind!r}: must be one of {', '.join(_TEXT_TYPES)}")
    given = config.get("text_config")
    if not isinstance(given, Mapping):
        raise ModelRefusedError(f"text_config: {given!r}: must be an object")
    if (text_type := given.get("model_type", _TEXT_TYPES[kind])) != _TEXT_TYPES[kind]:
        raise ModelRefusedError(f"text_config.model_type: {text_type!r}: must be {_TEXT_TYPES[kind]!r}")
    for name, allowed in _REQUIRED.items():
        value = (given if name != "quantization_config" else {**given, **config}).get(name, allowed[-1])
        if value not in allowed:
            raise ModelRefusedError(f"{name}: {value!r}: must be {allowed[0]!r}")
    num_layers, *_ = (read_integer(given, name) for name in _SIZES)
    if given.get("num_kv_shared_layers") not in (None, 0, num_layers):
        limit = f"must be num_hidden_layers = {num_layers}, as the target's keys are read"
        raise ModelRefusedError(f"num_kv_shared_layers: {given['num_kv_shared_layers']!r}: {limit}")
    own: dict[str, Any] = {"num_kv_shared_layers": 0}
    if kind == "gemma4_assistant":
        own["hidden_size_per_layer_input"] = 0
    try:
        text = CONFIG_MAPPING[text_type].from_dict({**given, **own})
        _check_layers(text, num_layers)
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever the fields make transformers raise
        raise refusal_of(error) from error
    text._attn_implementation = ATTENTION_NAME
    return text


def refusal_of(error: Exception) -> ModelRefusedError:
    """The refusal of a text_config that makes transformers raise an error."""
    return ModelRefusedError("text_config: " + " ".join(f"{type(error).__name__}: {error}".split()))


def _check_layers(text: Any, num_layers: int) -> None:
    kinds = text.layer_types
    if len(kinds) != num_layers or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        limit = f"must be full_attention or sliding_attention for each of {num_layers} layers"
        raise ModelRefusedError(f"layer_types: {kinds!r}: {limit}")
    for kind in sorted(set(kinds)):
        rope = text.rope_parameters.get(kind) or {}
        if (rope_type := rope.get("rope_type")) not in _ROPE_TYPES:
            limit = f"must be one of {', '.join(_ROPE_TYPES)}"
            raise ModelRefusedError(f"rope_parameters.{kind}.rope_type: {rope_type!r}: {limit}")
        if (head_dim := text.per_layer_config[kind].head_dim) < 2 or head_dim % 2:
            raise ModelRefusedError(f"head_dim: {head_dim}: must be even, as positions rotate pairs")
    if text.sliding_window < 1:
        raise ModelRefusedError(f"sliding_window: {text.sliding_window}: must be at least 1")
