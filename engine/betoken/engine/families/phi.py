"""Phi-3 and PhiMoE."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.families.family import Architecture, Family, Given
from betoken.engine.mixers.attention import state_window


def _phimoe_angles(module: Any) -> None:
    """Leave PhiMoE one size of cosines and sines, which it chooses by the longest text of a batch.

    `settle_frequencies` has made both sizes equal where texts may be longer than the original length.
    """
    rope = module.config.rope_parameters
    scale = module.attention_scaling if rope["rope_type"] == "default" else rope["short_mscale"]

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    module.forward = forward


def _take_long_size(rope: dict[str, Any]) -> None:
    """PhiMoE's code takes the short factors always, and another size of the rotation for long texts."""
    if "long_mscale" in rope:
        rope["short_mscale"] = rope["long_mscale"]
    else:
        rope["short_factor"] = rope["long_factor"]


def _finish(given: Given) -> None:
    size = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    given["partial_rotary_factor"] = given.pop("rotary_dim", size) / size


_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.dimension_count": "rotary_dim",
}

PHI3 = Family(
    model_types=("phi3",),
    gguf={
        "phi3": Architecture("phi3", "phi3", _KEYS, _finish, ("rope_factors_long.weight", "rope_factors_short.weight"))
    },
)

PHIMOE = Family(
    model_types=("phimoe",),
    bindings={"PhimoeAttention": state_window, "PhimoeRotaryEmbedding": _phimoe_angles},
    take_long_factors=_take_long_size,
)
