"""Llama 4: attention within spans of positions, and a mixture whose experts run one by one."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family
from betoken.engine.mixers.attention import attend, rotate_pairs
from betoken.engine.mixers.llama4_mixture import Llama4Mixture


def _llama4(module: Any) -> None:
    """Replace Llama 4's attention: spans of positions, layers without rotation, queries that grow with the position."""
    config, layer = module.config, module.layer_idx
    span = config.attention_chunk_size if config.layer_types[layer] == "chunked_attention" else 0
    scoring = Scoring(module.scaling, 0, 0.0, None, span or 0)

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **keywords: Any
    ) -> tuple[Tensor, None]:
        angles, position_ids = position_embeddings
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, module.head_dim))
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        if module.use_rope:
            query, key = (_rotate(rows, angles) for rows in (query, key))
        if hasattr(module, "qk_norm"):
            query, key = module.qk_norm(query), module.qk_norm(key)
        if module.attn_temperature_tuning and not module.use_rope:
            steps = torch.floor((position_ids.float() + 1.0) / module.floor_scale)
            growth = torch.log1p(steps) * module.attn_scale + 1.0
            query = (query * growth[..., None, None]).to(query.dtype)
        return module.o_proj(attend(layer, query, key, value, scoring)), None

    module.forward = forward


def _llama4_angles(module: Any) -> None:
    """Give cosines and sines [1, R, 2, D / 2] in the place of complex numbers, which compilers do not take, and the
    positions, which layers without rotation take."""

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].float() * module.inv_freq.float()
        return torch.stack([angles.cos(), angles.sin()], dim=-2) * module.attention_scaling, position_ids

    module.forward = forward


def _rotate(rows: Tensor, angles: Tensor) -> Tensor:
    """[1, R, H, D] by cosines and sines [1, R, 2, D / 2]."""
    return rotate_pairs(rows, *angles[:, :, None].unbind(-2))


def _llama4_layer(module: Any) -> None:
    """Replace a mixture that runs all experts by `Llama4Mixture`, which runs the chosen experts."""
    if module.is_moe_layer:
        module.feed_forward = Llama4Mixture(module.feed_forward, module.self_attn.config)


def _run_experts_by_row(model: Any) -> None:
    """Select the experts of `Llama4Mixture`, which transformers does not know in this family."""
    model._can_set_experts_implementation = lambda: True
    model.set_experts_implementation("batched_mm")


LLAMA4 = Family(
    model_types=("llama4_text",),
    multimodal=("llama4",),
    layer_types=frozenset({"chunked_attention"}),
    has_own_attention=True,
    bindings={
        "Llama4TextAttention": _llama4,
        "Llama4TextRotaryEmbedding": _llama4_angles,
        "Llama4TextDecoderLayer": _llama4_layer,
    },
    finish=_run_experts_by_row,
)
