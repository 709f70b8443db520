"""Configurations of targets whose layers mix tokens in other ways than attention, and cells of the exactness matrix."""

from typing import Any

from transformers import (
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    MiniMaxConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
)

CELLS = {
    "short convolution": [
        "float32-t0.8-early_exit_tree-k4-c8",
        "bfloat16-t0.8-ngram@attached-k4-c8-verify-killed",
    ],
    "gated delta": [
        "float32-t0-model_tree-k8-c8",
        "bfloat16-t0-model_tree-k4-c8-preemption",
    ],
    "mamba-2": [
        "float32-t0-lookahead-k8-c8",
        "float32-t0-model-k4-c8-draft-killed",
    ],
}
"""Cells of each in the default run, on two sets of services at most; the slow run has the whole matrix."""
FURTHER = [
    "float32-t0-ngram-k4-c8",
    "float32-t0.8-ngram-k4-c8",
    "float32-t0-early_exit_tree-k4-c8",
    "float32-t0.8-model_tree-k8-c8",
    "float32-t0.8-lookahead-k8-c1",
    "bfloat16-t0-ngram-k4-c8-preemption",
]
"""More cells of the targets that only the slow run tests."""
COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
CONFIGS = {
    "short convolution": lambda: Lfm2Config(
        **COMMON,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv"],
    ),
    "gated delta": lambda: Qwen3_5TextConfig(
        **COMMON,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "mamba-2": lambda: GraniteMoeHybridConfig(
        **COMMON,
        layer_types=["mamba", "full_attention", "mamba"],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        num_local_experts=0,
        shared_intermediate_size=64,
    ),
}
WIDER = {
    "mamba": lambda: JambaConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, attn_layer_period=4, attn_layer_offset=1, mamba_d_state=8
    ),
    "lightning attention": lambda: MiniMaxConfig(
        **COMMON,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "rg-lru": lambda: RecurrentGemmaConfig(
        **COMMON,
        w_init_variance_scale=4.0,
        attention_window_size=64,
        block_types=["recurrent", "attention"],
    ),
}
