"""Tiny configurations of families whose layers are transformers' usual ones, with what sets each apart switched on."""

from functools import partial
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_HEAD = {"head_dim": 16}
_KINDS = ["sliding_attention", "full_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_WINDOWS = {"sliding_window": 9, "layer_types": _KINDS}
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
_EXPERTS = {"num_experts": 4, **_CHOSEN}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_CHOSEN}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_GRANITE = {
    "embedding_multiplier": 1.7,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.6,
    "logits_scaling": 1.3,
}
_GEMMA = {**_HEAD, **_WINDOWS, "query_pre_attn_scalar": 16}
_GEMMA_4 = {
    **_HEAD,
    **_WINDOWS,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 101,
}

_FIELDS: dict[str, dict[str, Any]] = {
    "afmoe": {**_HEAD, **_WINDOWS, **_EXPERTS, "num_dense_layers": 1},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "intermediate_size": 48},
    "axk1": {**_LATENT, **_ROUTED},
    "beam": {**_HEAD, **_WINDOWS, **_EXPERTS},
    "biogpt": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": {**_WINDOWS, "logit_scale": 0.3},
    "cohere2_moe": {**_HEAD, **_WINDOWS, **_EXPERTS, "logit_scale": 0.3},
    "cohere_compass_text": {**_WINDOWS, "logit_scale": 0.3, "rope_parameters": dict.fromkeys(_KINDS, _ROPE)},
    "ctrl": {"n_embd": 64, "dff": 96, "n_layer": 2, "n_head": 4, "n_positions": 640},
    "cwm": {**_HEAD, **_WINDOWS},
    "dots1": {**_HEAD, **_ROUTED, "n_shared_experts": 1, "routed_scaling_factor": 1.5},
    "ernie4_5": {**_HEAD},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_layer_start_index": 1},
    "exaone4": {**_HEAD, **_WINDOWS},
    "exaone_moe": {**_HEAD, **_WINDOWS, **_EXPERTS},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": {**_HEAD, **_WINDOWS},
    "gemma": {**_HEAD},
    "gemma3_text": {**_GEMMA},
    "gemma3n_text": {
        **_HEAD,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 9,
        "layer_types": _KINDS * 2,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 101,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "gemma4_text": {**_GEMMA_4},
    "gemma4_unified_text": {**_HEAD, **_WINDOWS, "global_head_dim": 32},
    "glm": {**_HEAD},
    "glm4": {**_HEAD},
    "glm4_moe": {**_HEAD, **_ROUTED, "use_qk_norm": True},
    "glm4_moe_lite": {**_LATENT, **_ROUTED},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 640, "n_inner": 96},
    "granite": {**_GRANITE},
    "granitemoe": {**_GRANITE, **_LOCAL_EXPERTS},
    "granitemoe_swa": {**_GRANITE, **_WINDOWS, **_LOCAL_EXPERTS},
    "granitemoeshared": {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 48},
    "helium": {**_HEAD},
    "hunyuan_v1_dense": {**_HEAD},
    "hunyuan_v1_moe": {**_HEAD, "num_experts": 4, "moe_topk": 2},
    "hy_v3": {**_HEAD, **_EXPERTS},
    "hyperclovax": {**_GRANITE},
    "internlm3": {**_HEAD},
    "iquestcoder": {**_HEAD},
    "jais2": {**_HEAD},
    "kolibri1": {**_HEAD, **_WINDOWS, **_EXPERTS},
    "laguna": {**_HEAD, **_WINDOWS, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "mellum": {**_HEAD, **_EXPERTS},
    "mimo_v2_flash": {**_HEAD, **_WINDOWS, **_ROUTED, "v_head_dim": 8},
    "minicpm3": {**_LATENT},
    "minimax_m2": {**_HEAD, **_LOCAL_EXPERTS},
    "ministral": {**_HEAD, **_WINDOWS},
    "ministral3": {**_HEAD},
    "mistral": {**_HEAD, "sliding_window": 9},
    "modernbert-decoder": {**_WINDOWS},
    "nanochat": {},
    "olmo": {"clip_qkv": 1.0},
    "olmo2": {},
    "olmo3": {**_WINDOWS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": 9},
    "phimoe": {"sliding_window": 9, **_LOCAL_EXPERTS},
    "qwen2": {**_WINDOWS, "use_sliding_window": True},
    "qwen2_moe": {**_WINDOWS, "use_sliding_window": True, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_HEAD, **_EXPERTS},
    "seed_oss": {**_HEAD},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "solar_open": {**_HEAD, **_ROUTED},
    "starcoder2": {"sliding_window": 9},
    "vaultgemma": {**_GEMMA},
    "youtu": {**_LATENT},
}


def _make(family: str) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**_SIZES | _FIELDS[family])


POPULAR = {family: partial(_make, family) for family in _FIELDS}
"""Families by transformers' names."""
