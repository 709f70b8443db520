"""Tiny configurations of families whose layers keep a recurrent state, or short convolutions."""

from collections.abc import Iterable
from typing import Any

import pytest
from transformers import (
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2MoeConfig,
    Lfm3Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
    ZambaConfig,
)

COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
"""Sizes of every family."""

_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}

_MAMBA_1 = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "state_size": 8,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

HYBRIDS: dict[str, Any] = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        **_GATED_DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        **_GATED_DELTA,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        head_dim=16,
        **_GATED_DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv"],
        pad_token_id=0,
    ),
    "lfm3": lambda: Lfm3Config(
        **COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        layer_types=["conv", "full_attention", "sliding_attention", "conv"],
        pad_token_id=0,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        **_GATED_DELTA | {"linear_num_key_heads": 4},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=4,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        linear_head_dim=16,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=4,
        head_dim=16,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        qk_nope_head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=4,  # all of a group: roundings choose among groups alone
        moe_intermediate_size=48,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "mamba2": lambda: Mamba2Config(
        vocab_size=101,
        hidden_size=64,
        num_hidden_layers=2,
        state_size=16,
        num_heads=8,
        head_dim=16,
        n_groups=2,
        max_position_embeddings=640,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    ),
    "bamba": lambda: BambaConfig(
        **COMMON | {"num_hidden_layers": 3}, num_key_value_heads=2, attn_layer_indices=[1], **_MAMBA, pad_token_id=0
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        layer_types=["mamba", "full_attention", "mamba"],
        **_MAMBA,
        num_local_experts=0,
        shared_intermediate_size=96,
        pad_token_id=0,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **COMMON, num_key_value_heads=2, head_dim=16, mamba_d_ssm=128, **_MAMBA, pad_token_id=0
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        layers_block_type=["mamba", "full_attention", "mlp", "mamba"],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        pad_token_id=0,
    ),
    "jamba": lambda: JambaConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_d_state=8,
        pad_token_id=0,
    ),
    "mamba": lambda: MambaConfig(**_MAMBA_1),
    "falcon_mamba": lambda: FalconMambaConfig(**_MAMBA_1),
    "zamba": lambda: ZambaConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        n_mamba_heads=2,
        mamba_d_state=8,
        layers_block_type=["hybrid", "mamba", "hybrid"],
        pad_token_id=0,
    ),
    "zamba2": lambda: Zamba2Config(
        **COMMON,
        mamba_ngroups=2,
        mamba_d_state=16,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        layers_block_type=["mamba", "hybrid"],
        pad_token_id=0,
    ),
    "minimax": lambda: MiniMaxConfig(
        **COMMON,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=16,
        layer_types=["linear_attention", "full_attention"],
        pad_token_id=0,
    ),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        attention_window_size=9,
        block_types=["recurrent", "attention"],
        pad_token_id=0,
    ),
}
"""Families with recurrent states."""

WIDER = ("bailing_hybrid", "bamba", "falcon_mamba", "lfm2_moe", "lfm3", "mamba", "qwen3_5_moe", "zamba", "zamba2")
"""Families whose mixers are another's; their tests are run on demand."""


def by_width(families: Iterable[str]) -> list[Any]:
    """The families as parameters of a test, the wider ones marked slow."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in WIDER else name for name in families]
