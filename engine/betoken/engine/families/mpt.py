"""MPT: attention from before transformers' interface, whose scores fall with distance."""

import sys
from typing import Any

import torch
from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family, skip_mask
from betoken.engine.mixers.attention import attend
from betoken.engine.mixers.rebinding import rebind


def _mpt(module: Any) -> None:
    """Replace MPT's attention, whose scores fall with distance."""
    make = sys.modules[type(module).__module__].build_mpt_alibi_tensor
    slopes = -make(module.n_heads, 2, device=module.out_proj.weight.device).float()[:, 0, 0]
    scoring = Scoring(float(module.softmax_scale), 0, 0.0, None, 0, slopes.contiguous())

    def forward(hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        query, key, value = mixed.unflatten(-1, (3, module.n_heads, module.head_dim)).unbind(2)
        return module.out_proj(attend(module.layer_idx, query, key, value, scoring)), None

    module.forward = forward


def _mpt_model(module: Any) -> None:
    """Have MPT make neither its mask nor its biases, of which there would be one for each pair of positions."""
    rebind(module, {"create_causal_mask": lambda **keywords: torch.zeros(0)})
    module.build_mpt_alibi_tensor = lambda *arguments, **keywords: None


MPT = Family(
    model_types=("mpt",),
    has_own_attention=True,
    is_loaded_eagerly=True,
    bindings={"MptAttention": _mpt, "MptModel": _mpt_model},
    finish=skip_mask,
)
