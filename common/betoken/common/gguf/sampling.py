"""Default sampling of a GGUF file: the values in its metadata, or llama.cpp's if it has none."""

from typing import Any

from betoken.common.float32 import shortest
from betoken.common.gguf.header import GgufHeader

_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Field of `GenerationConfig` by the end of a key. Source: llama.cpp's llama-arch.cpp, `general.sampling.*`."""
_OF_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""Source: llama.cpp's common.h, `common_params_sampling`."""


def default_sampling(header: GgufHeader) -> dict[str, Any]:
    """Return the default sampling as fields of `GenerationConfig`."""
    values = {name: header.metadata.get(f"general.sampling.{key}") for key, name in _KEYS.items()}
    given = {name: shortest(value) if isinstance(value, float) else value for name, value in values.items()}
    return {name: value for name, value in given.items() if value is not None} or dict(_OF_LLAMA_CPP)
