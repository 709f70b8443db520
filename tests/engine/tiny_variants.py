"""Configurations of families with special attention: spans, distances, partially rotated heads."""

from typing import Any

from transformers import (
    BloomConfig,
    CodeGenConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    MptConfig,
    NemotronConfig,
    StableLmConfig,
)

_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    **_ENDS,
}
_FALCON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    **_ENDS,
}

LATENT = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "pad_token_id": 0,
}
"""Latent attention, as DeepSeek's."""

VARIANTS: dict[str, Any] = {
    "bloom": lambda: BloomConfig(vocab_size=101, hidden_size=96, n_layer=2, n_head=6, seq_length=640, **_ENDS),
    "codegen": lambda: CodeGenConfig(
        vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=640, rotary_dim=8, **_ENDS
    ),
    "deepseek_v2": lambda: DeepseekV2Config(**LATENT),
    "deepseek_v3": lambda: DeepseekV3Config(**LATENT),
    "falcon": lambda: FalconConfig(**_FALCON),
    "falcon, groups of heads": lambda: FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon, all heads": lambda: FalconConfig(**_FALCON, multi_query=False, parallel_attn=False, bias=True),
    "gpt_neo": lambda: GPTNeoConfig(
        vocab_size=101,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        max_position_embeddings=640,
        attention_types=[[["global", "local"], 1]],
        window_size=9,
        **_ENDS,
    ),
    "gptj": lambda: GPTJConfig(vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=640, rotary_dim=8, **_ENDS),
    "llama4_text": lambda: Llama4TextConfig(
        **_COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        attention_chunk_size=16,
        no_rope_layers=[1, 1, 1, 0],
        floor_scale=8,
        pad_token_id=0,
    ),
    "mpt": lambda: MptConfig(
        vocab_size=101, d_model=96, n_layers=2, n_heads=6, max_seq_len=640, attn_config={"clip_qkv": 1.0}, **_ENDS
    ),
    "nemotron": lambda: NemotronConfig(**_COMMON, num_key_value_heads=2),
    "stablelm": lambda: StableLmConfig(
        **_COMMON, num_key_value_heads=2, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=True
    ),
}
"""Families, and what their configurations choose."""
