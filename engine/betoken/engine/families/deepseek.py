"""DeepSeek-V2 and -V3, and Kimi-K2.5, whose text is a DeepSeek-V3."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.families.family import Family
from betoken.engine.mixers.attention import rotate_pairs
from betoken.engine.mixers.rebinding import rebind


def _deepseek_v2_angles(module: Any) -> None:
    """Give cosines and sines [2, 1, R, D / 2] in the place of complex numbers, which compilers do not take."""

    def forward(x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        scale: float = module.attention_scaling
        return torch.stack([angles.cos(), angles.sin()]) * scale

    module.forward = forward


def _deepseek_v2(module: Any) -> None:
    """Have DeepSeek-V2's attention rotate by these."""
    rebind(module, {"apply_rotary_emb": _rotate_both})


def _rotate_both(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Query [1, H, R, D] and key [1, 1, R, D]."""
    cos, sin = angles[:, :, None].unbind(0)
    return rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin)


DEEPSEEK_V2 = Family(
    model_types=("deepseek_v2",),
    bindings={"DeepseekV2RotaryEmbedding": _deepseek_v2_angles, "DeepseekV2Attention": _deepseek_v2},
)

DEEPSEEK_V3 = Family(model_types=("deepseek_v3",), multimodal=("kimi_k25",), draft_tensors=r"model\.layers\.61\..*")
