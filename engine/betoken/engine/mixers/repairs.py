"""Small parts of single families that read what a row of ours lacks: a mask, a weight, the batch's longest text.

Each is bound anew with the same result for a text alone. Nothing of transformers is changed.
"""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from betoken.engine.attention import MASKED_WINDOW


def _masked_window(module: Any) -> None:
    """Tell our attention the window that PhiMoE and Qwen2-MoE leave to their mask."""
    kinds = getattr(module.config, "layer_types", None)
    if not kinds or kinds[module.layer_idx] == "sliding_attention":
        setattr(module, MASKED_WINDOW, module.config.sliding_window)


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


def _deepseek_v2_angles(module: Any) -> None:
    """Give cosines and sines [2, 1, R, D / 2] in the place of complex numbers, which compilers do not take."""

    def forward(x: Tensor, position_ids: Tensor) -> Tensor:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        scale: float = module.attention_scaling
        return torch.stack([angles.cos(), angles.sin()]) * scale

    module.forward = forward


def _deepseek_v2(module: Any) -> None:
    """Have DeepSeek-V2's attention rotate by these."""
    forward = inspect.unwrap(type(module).forward)
    ours = {**forward.__globals__, "apply_rotary_emb": _rotate_both}
    bound = FunctionType(forward.__code__, ours, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)


def _rotate_both(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Query [1, H, R, D] and key [1, 1, R, D], whose neighbours are pairs."""
    cos, sin = angles[:, :, None].unbind(0)
    turned = []
    for rows in (query, key):
        first, second = rows.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
        pairs = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
        turned.append(pairs.flatten(-2).to(rows.dtype))
    return turned[0], turned[1]


def _hunyuan_gate(module: Any) -> None:
    """Replace HunYuan's router, which asks the weight of a linear layer for its type."""
    casts = module.wg.weight.dtype == torch.float32

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores = module.wg(rows.float() if casts else rows)
        weights, expert_ids = torch.topk(torch.softmax(scores, dim=1, dtype=torch.float32), module.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return scores, weights.to(scores.dtype), expert_ids

    module.forward = forward


REPAIRS: Mapping[str, Callable[[Any], None]] = {
    "PhimoeAttention": _masked_window,
    "Qwen2MoeAttention": _masked_window,
    "PhimoeRotaryEmbedding": _phimoe_angles,
    "DeepseekV2RotaryEmbedding": _deepseek_v2_angles,
    "DeepseekV2Attention": _deepseek_v2,
    "HunYuanMoEV1Gate": _hunyuan_gate,
}
"""Class of transformers -> what makes it fit."""
