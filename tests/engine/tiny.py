"""Tiny random checkpoints of every family the engine must serve."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteSWAConfig,
    Lfm2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from tests.engine.tiny_hybrids import COMMON, HYBRIDS
from tests.engine.tiny_popular import POPULAR
from tests.engine.tiny_refused import REFUSED
from tests.engine.tiny_variants import VARIANTS

CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**COMMON, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=32),
    "mixtral": lambda: MixtralConfig(
        **COMMON, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=9
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**COMMON),
    "gpt2": lambda: GPT2Config(vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=640, eos_token_id=0),
    "gemma2": lambda: Gemma2Config(
        **COMMON,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
    ),
    "granite_swa": lambda: GraniteSWAConfig(
        **COMMON, num_key_value_heads=2, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    "lfm2": lambda: Lfm2Config(
        **COMMON | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        block_auto_adjust_ff_dim=False,
        conv_bias=True,
        layer_types=["conv", "full_attention", "conv", "conv"],
        pad_token_id=0,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
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

_LARGE = (
    *("conv.conv.weight", "conv.conv.bias", "conv.in_proj.bias", "conv1d.weight", "conv_1d.weight"),
    "A_log",
)
"""Ends of names of weights of size 1: what convolutions add would be lost, and decays be alike."""

MIXTURES = ("mixtral", "gpt_oss")
"""Families with experts."""


def save_tiny(directory: Path, family: str, seed: int = 0) -> str:
    """Write a random model whose logits are spread enough to compare; returns its directory."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config((CONFIGS | HYBRIDS | VARIANTS | POPULAR | REFUSED)[family]())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(std=3.0)  # as large as scores: whoever leaves them out is far off
            elif name.endswith(_LARGE):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    return str(directory)
