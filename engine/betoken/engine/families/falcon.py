"""Falcon, Falcon-Mamba and Falcon-H1."""

import sys
from typing import Any

from torch import Tensor, nn

from betoken.engine.attention import Scoring
from betoken.engine.families.family import Family, skip_mask
from betoken.engine.mixers.attention import attend
from betoken.engine.mixers.recurrences import keep_head_weight, mamba2
from betoken.engine.mixers.selective_scan import SelectiveScan


def _falcon(module: Any) -> None:
    """Replace Falcon's attention with rotary positions. Its heads share keys by groups, which it copies for each."""
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    num_groups = module.num_kv_heads
    is_joined_by_group = module.new_decoder_architecture or module.multi_query

    def forward(
        hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **keywords: Any
    ) -> tuple[Tensor, None]:
        fused = module.query_key_value(hidden_states)
        if is_joined_by_group:
            parts = fused.unflatten(-1, (num_groups, module.num_heads // num_groups + 2, module.head_dim))
            query, key, value = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
        else:
            query, key, value = fused.unflatten(-1, (module.num_heads, 3, module.head_dim)).unbind(3)
        query, key = rotate(query.transpose(1, 2), key.transpose(1, 2), *position_embeddings)
        scoring = Scoring(module.head_dim**-0.5, 0, 0.0, None)
        out = attend(module.layer_idx, query.transpose(1, 2), key.transpose(1, 2), value, scoring)
        return module.dense(out), None

    module.forward = forward


def _falcon_linears(module: Any) -> None:
    """Make linear layers of Falcon's own kind stock ones, which ours replace."""
    for name, child in list(module.named_children()):
        if type(child).__name__ == "FalconLinear":
            linear = nn.Linear(child.in_features, child.out_features, child.bias is not None, device="meta")
            linear.weight, linear.bias = child.weight, child.bias
            setattr(module, name, linear)


def _falcon_attention(module: Any) -> None:
    _falcon_linears(module)
    _falcon(module)


def _find_fault(config: Any) -> str | None:
    return "alibi = true: its biases are rounded to bfloat16 by absolute position" if config.alibi else None


FALCON = Family(
    model_types=("falcon",),
    find_fault=_find_fault,
    has_own_attention=True,
    is_loaded_eagerly=True,
    bindings={"FalconAttention": _falcon_attention, "FalconMLP": _falcon_linears},
    finish=skip_mask,
)

FALCON_MAMBA = Family(
    model_types=("falcon_mamba",),
    layer_types=frozenset({"mamba", "linear_attention"}),
    mixers={"FalconMambaMixer": SelectiveScan},
    finish=keep_head_weight,
)

FALCON_H1 = Family(
    model_types=("falcon_h1",),
    layer_types=frozenset({"mamba", "hybrid", "linear_attention"}),
    recurrences={"mamba2_chunk_scan": mamba2},
)
