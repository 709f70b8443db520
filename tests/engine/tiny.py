"""Tiny random checkpoints of every family the engine must serve."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HunYuanMoEV1Config,
    KimiLinearConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

_COMMON = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "sliding_window": 32}

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

REFUSED: dict[str, Any] = {
    "falcon": lambda: FalconConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0
    ),
    "nemotron": lambda: NemotronConfig(**_COMMON, num_key_value_heads=2),
    "hunyuan_moe": lambda: HunYuanMoEV1Config(
        **_COMMON, num_key_value_heads=2, num_experts=4, moe_topk=2, head_dim=16, pad_token_id=0
    ),
    "phimoe": lambda: PhimoeConfig(**_COMMON, **_EXPERTS, num_local_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_COMMON,
        **_EXPERTS,
        use_sliding_window=True,
        num_experts=4,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
"""Families that are refused, or are with such settings."""

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**_COMMON, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=32),
    "mixtral": lambda: MixtralConfig(
        **_COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=9
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON),
    "gpt2": lambda: GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=640, eos_token_id=0),
    "gemma2": lambda: Gemma2Config(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "granite_swa": lambda: GraniteSWAConfig(
        **_COMMON, num_key_value_heads=2, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    "lfm2": lambda: Lfm2Config(
        **_COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        layer_types=["conv", "full_attention", "conv", "conv"],
        pad_token_id=0,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 160,
        },
    ),
}

HYBRIDS: dict[str, Any] = {
    "qwen3_next": lambda: Qwen3NextConfig(
        **_COMMON | {"num_hidden_layers": 4},
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
        **_COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        **_GATED_DELTA,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **_COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        **_GATED_DELTA | {"linear_num_key_heads": 4},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        pad_token_id=0,
    ),
    "kimi_linear": lambda: KimiLinearConfig(
        **_COMMON | {"num_hidden_layers": 3},
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
        **_COMMON | {"num_hidden_layers": 3}, num_key_value_heads=2, attn_layer_indices=[1], **_MAMBA, pad_token_id=0
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **_COMMON | {"num_hidden_layers": 3},
        num_key_value_heads=2,
        layer_types=["mamba", "full_attention", "mamba"],
        **_MAMBA,
        num_local_experts=0,
        shared_intermediate_size=96,
        pad_token_id=0,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **_COMMON, num_key_value_heads=2, head_dim=16, mamba_d_ssm=128, **_MAMBA, pad_token_id=0
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **_COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=16,
        layers_block_type=["mamba", "full_attention", "mlp", "mamba"],
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        pad_token_id=0,
    ),
}
"""Families with recurrent states."""

MIXTURES = ("mixtral", "gpt_oss")
"""Families with experts."""


def save_tiny(directory: Path, family: str, seed: int = 0) -> str:
    """Write a random model whose logits are spread enough to compare; returns its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | HYBRIDS | REFUSED)[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=3.0)  # as large as scores: whoever leaves them out is far off
            elif name.endswith(("conv.conv.weight", "conv.conv.bias", "conv.in_proj.bias")):
                parameter.normal_()  # or what convolutions add would be lost beside the rest
            elif parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    return str(directory)
