"""Fields of config.json that all attached drafters with their own layers read. Wrong values are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from betoken.engine.errors import ModelRefusedError


def read_integer(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """The integer in a field, or its default.

    Raises:
        ModelRefusedError: it is missing, another type, or below `least`.
    """
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < least:
        raise ModelRefusedError(f"{name}: {value!r}: must be an integer of at least {least}")
    return value


def read_heads(layer: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key heads and their width.

    Raises:
        ModelRefusedError: they do not fit each other.
    """
    hidden_size, num_heads = read_integer(layer, "hidden_size"), read_integer(layer, "num_attention_heads")
    if hidden_size % num_heads and layer.get("head_dim") is None:
        raise ModelRefusedError(f"hidden_size: {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    num_kv_heads = read_integer(layer, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelRefusedError(f"num_key_value_heads: {num_kv_heads}: must divide num_attention_heads = {num_heads}")
    head_dim = read_integer(layer, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelRefusedError(f"head_dim: {head_dim}: must be even, as positions rotate pairs")
    return num_heads, num_kv_heads, head_dim


def read_number(config: Mapping[str, Any], name: str, default: float) -> float:
    """The number above 0 in a field, or its default.

    Raises:
        ModelRefusedError: it is another type, or not above 0.
    """
    value = config.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0.0 < value < math.inf:
        raise ModelRefusedError(f"{name}: {value!r}: must be a number above 0")
    return float(value)


def read_rope(layer: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters in the names of transformers.

    Raises:
        ModelRefusedError: another kind.
    """
    stored = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(stored, Mapping):
        raise ModelRefusedError(f"rope_parameters: {stored!r}: must be an object")
    given = dict(stored)
    if "rope_theta" not in given:
        given["rope_theta"] = layer.get("rope_theta") or 10000.0
    given["rope_type"] = given.pop("type", None) or given.get("rope_type") or "default"
    if given["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        raise ModelRefusedError(f"rope_type: {given['rope_type']!r}: must be default, linear, llama3 or yarn")
    return given


def has_attention_bias(layer: Mapping[str, Any]) -> bool:
    """Whether query, key and value projections have a bias."""
    return bool(layer.get("attention_bias", layer.get("qkv_bias", layer.get("model_type") == "qwen2")))


def read_base(config: Mapping[str, Any]) -> str:
    """Name of the target that the layers were made for; empty if it is not given."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or config.get("base_model_name_or_path") or "")
