"""How a GGUF file stretches positions: by a factor, by YaRN, or by a factor of every frequency.

The last ones are stored in small tensors, which are read here.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

from betoken.common.gguf import GgufHeader
from betoken.engine.errors import ModelRefusedError

_FACTORS = "gguf_factors"
"""Custom rope type: each frequency is divided by a factor."""
_ORIGINAL = "rope.scaling.original_context_length"


def rope_scaling(header: GgufHeader, names: tuple[str, ...], get: Callable[[str], Any]) -> dict[str, Any] | None:
    """transformers' description of what the file does to positions; None for nothing.

    Args:
        names: of the tensors of factors that the architecture may have, the long one first.
        get: the value of a key below the architecture's.

    Raises:
        ModelRefusedError: a type of scaling, or factors, that are not supported.
    """
    kind, factor = get("rope.scaling.type"), get("rope.scaling.factor")
    original, attention = get(_ORIGINAL), get("rope.scaling.attn_factor")
    get("rope.scaling.finetuned")  # describes how the model came to it
    factors = _read_factors(header, names)
    if len(names) == 2 and factors:
        if len(factors) != 2 or original is None:
            raise ModelRefusedError(f"{', '.join(names)} and {_ORIGINAL} come together")
        long, short = factors
        more = {} if attention is None else {"attention_factor": attention}
        return {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": original,
        } | more
    if attention not in (None, 1.0):
        raise ModelRefusedError(f"rope.scaling.attn_factor = {attention!r} is not supported")
    if kind in (None, "none") or (kind == "linear" and factor in (0.0, 1.0)):
        return {"rope_type": _FACTORS, "factors": factors[0]} if factors else None
    if kind not in ("linear", "yarn") or not isinstance(factor, float) or factors:
        raise ModelRefusedError(f"rope.scaling.type = {kind!r} is not supported, factor {factor!r}")
    scaling = {"rope_type": kind, "factor": factor}
    return scaling if kind == "linear" else scaling | {"original_max_position_embeddings": original}


def _read_factors(header: GgufHeader, names: tuple[str, ...]) -> list[list[float]]:
    found = {tensor.name: tensor for tensor in header.tensors}
    factors = []
    for tensor in (found[name] for name in names if name in found):
        if tensor.type != "F32" or len(tensor.shape) != 1:
            raise ModelRefusedError(f"tensor {tensor.name!r}, {tensor.type} {list(tensor.shape)}: no row of F32")
        numbers = np.fromfile(tensor.path, np.float32, tensor.shape[0], offset=tensor.start)
        if not (np.isfinite(numbers) & (numbers > 0)).all():
            raise ModelRefusedError(f"tensor {tensor.name!r}: a factor is not a finite number above 0")
        factors.append(numbers.tolist())
    return factors


def _frequencies(
    config: Any, device: Any = None, seq_len: int | None = None, layer_type: str | None = None
) -> tuple[Tensor, float]:
    """As transformers asks for them: [size / 2] float32, and what multiplies sines and cosines."""
    rope = config.rope_parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    places = torch.arange(0, size, 2, dtype=torch.int64, device=device).float() / size
    factors = torch.tensor(rope["factors"], dtype=torch.float32, device=device)
    return 1.0 / (rope["rope_theta"] ** places) / factors, 1.0


def _check_factors(config: Any, rope: dict[str, Any], ignore_keys: set[str] | None = None) -> None:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if len(rope["factors"]) != size // 2:
        raise ValueError(f"{len(rope['factors'])} factors of frequencies, not {size // 2}")


ROPE_INIT_FUNCTIONS[_FACTORS] = _frequencies
setattr(RotaryEmbeddingConfigMixin, f"_validate_{_FACTORS}_rope_parameters", _check_factors)
