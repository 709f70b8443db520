"""Tiny configurations of families that are refused, or are with such settings."""

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    DeepseekV32Config,
    FalconConfig,
    InklingTextConfig,
    PreTrainedConfig,
    Qwen4ExpTextConfig,
    RwkvConfig,
    xLSTMConfig,
)

from tests.engine.tiny_hybrids import COMMON
from tests.engine.tiny_variants import LATENT


def _usual(family: str, **fields: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**COMMON | {"num_key_value_heads": 2, "pad_token_id": 0} | fields)


REFUSED: dict[str, Any] = {
    "rwkv": lambda: RwkvConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, context_length=640, eos_token_id=0),
    "xlstm": lambda: xLSTMConfig(vocab_size=101, hidden_size=64, num_hidden_layers=2, num_heads=2, eos_token_id=0),
    "inkling": lambda: InklingTextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        mlp_layer_types=["dense", "dense"],
    ),
    "qwen4_exp_text": lambda: Qwen4ExpTextConfig(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        layer_types=["linear_attention", "indexed_attention"],
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=8,
        indexer_compress_ratio=4,
        pad_token_id=0,
    ),
    "deepseek_v32": lambda: DeepseekV32Config(**LATENT, index_n_heads=2, index_head_dim=16, index_topk=8),
    "dbrx": lambda: CONFIG_MAPPING["dbrx"](
        vocab_size=101,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=640,
        attn_config={"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
        ffn_config={"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        eos_token_id=0,
    ),
    "deepseek_v4": lambda: _usual(
        "deepseek_v4", head_dim=16, q_lora_rank=16, o_lora_rank=16, n_routed_experts=4, moe_intermediate_size=48
    ),
    "diffllama": lambda: _usual("diffllama"),
    "doge": lambda: _usual("doge"),
    "glm_moe_dsa": lambda: _usual("glm_moe_dsa", **LATENT, index_n_heads=2, index_head_dim=16, index_topk=8),
    "hrm_text": lambda: _usual("hrm_text"),
    "jetmoe": lambda: _usual("jetmoe", kv_channels=16, num_local_experts=4),
    "longcat_flash": lambda: _usual(
        "longcat_flash",
        **LATENT,
        head_dim=8,
        num_layers=2,
        ffn_hidden_size=96,
        expert_ffn_hidden_size=48,
        zero_expert_num=2,
        moe_topk=2,
    ),
    "minimax_m3_vl_text": lambda: _usual(
        "minimax_m3_vl_text",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "minimax_m3_sparse"],
        index_n_heads=2,
        index_head_dim=16,
        dense_intermediate_size=96,
        shared_intermediate_size=48,
    ),
    "openai-gpt": lambda: _usual("openai-gpt"),
    "xglm": lambda: _usual("xglm"),
    "zaya": lambda: _usual("zaya", head_dim=16, num_experts=4, moe_intermediate_size=48, router_hidden_size=16),
    "falcon, alibi": lambda: FalconConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0, alibi=True
    ),
}
"""Families by name."""
