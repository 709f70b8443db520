"""Sizes of a model, from config.json or the header of a GGUF file. It reads no weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from betoken.common.economy.column_split import ModelShape
from betoken.common.errors import InvalidArgumentError
from betoken.common.gguf import GgufError, find_gguf, read_header

_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
}
"""Fields of config.json, and the keys of a GGUF file below its architecture's."""
_FIELDS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_shape(model: str) -> ModelShape:
    """Return the sizes of a directory's or a GGUF file's model.

    Raises:
        InvalidArgumentError: it cannot be read, lacks a size, or has experts.
    """
    values = read_sizes(model)
    if any(values.get(name) for name in _EXPERTS):
        raise InvalidArgumentError("model", model, "must be a dense model, without experts")
    sizes = [values.get(name) for name in _FIELDS]
    for name, value in zip(_FIELDS, sizes, strict=True):
        if type(value) is not int or value < 1:
            raise InvalidArgumentError("model", model, f"must have {name}, an integer above 0, not {value!r}")
    num_layers, hidden_size, num_heads, intermediate_size, vocab_size = (int(size or 0) for size in sizes)
    head_size = values.get("head_dim") or hidden_size // num_heads
    return ModelShape(num_layers, hidden_size, num_heads * int(head_size), intermediate_size, vocab_size)


def read_sizes(model: str) -> Mapping[str, Any]:
    """Return the fields of a model by their names in config.json, from the header if it is a GGUF file.

    Raises:
        InvalidArgumentError: it cannot be read.
    """
    path = Path(os.path.expanduser(model))
    try:
        file = find_gguf(path)
        return _of_config(path / "config.json") if file is None else _of_gguf(file)
    except (GgufError, OSError, ValueError) as error:
        limit = f"must be a directory with config.json or a GGUF file: {error}"
        raise InvalidArgumentError("model", model, limit) from error


def _of_config(path: Path) -> Mapping[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, Mapping):
        raise ValueError(f"{path} is not an object")
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _of_gguf(path: Path) -> Mapping[str, Any]:
    header = read_header(path)
    values = {name: header.metadata.get(f"{header.architecture}.{key}") for name, key in _KEYS.items()}
    table = next((tensor for tensor in header.tensors if tensor.name == "token_embd.weight"), None)
    return values | {"vocab_size": None if table is None else table.shape[0]}
