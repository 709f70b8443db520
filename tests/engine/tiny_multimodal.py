"""Tiny configurations of multimodal models."""

from typing import Any

from transformers import (
    AriaConfig,
    DeepseekVLConfig,
    Exaone4_5_Config,
    Gemma3Config,
    Gemma3nConfig,
    Gemma4Config,
    Gemma4UnifiedConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Glm46VConfig,
    GlmOcrConfig,
    Idefics3Config,
    InternVLConfig,
    Kimi_K25Config,
    Lfm2VlConfig,
    Lfm3VlConfig,
    Llama4Config,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextVideoConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    SmolVLMConfig,
    VipLlavaConfig,
    VoxtralConfig,
)

IMAGE_ID = 99
"""The id that stands for a piece of an image, a video or a sound."""
_TEXT = {
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
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_HEAD = {"head_dim": 16}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SIGLIP = {"model_type": "siglip_vision_model", **_TOWER}
_CLIP = {"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER}
_DEEP = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 8}
_OUT = {**_DEEP, "out_hidden_size": 64}
_HYBRID = {
    **_HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_LATENT = {
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
}
_SOUND = {"num_mel_bins": 8, "max_source_positions": 16}
_INDICES = {"image_token_index": IMAGE_ID, "video_token_index": IMAGE_ID}
_VIDEO = {"image_token_id": IMAGE_ID, "video_token_id": IMAGE_ID}


def _text(model_type: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_TEXT, **fields}


CONFIGS: dict[str, Any] = {
    "llava": lambda: LlavaConfig(
        vision_config=_CLIP,
        text_config=_text("llama"),
        image_token_index=IMAGE_ID,
    ),
    "llava_next": lambda: LlavaNextConfig(
        vision_config=_CLIP,
        text_config=_text("mistral"),
        image_token_index=IMAGE_ID,
    ),
    "llava_onevision": lambda: LlavaOnevisionConfig(vision_config=_SIGLIP, text_config=_text("qwen2"), **_INDICES),
    "mistral3": lambda: Mistral3Config(
        vision_config={"model_type": "pixtral", **_TOWER, **_HEAD},
        text_config=_text("mistral", head_dim=24),
        image_token_index=IMAGE_ID,
    ),
    "mistral3, of Mistral 4": lambda: Mistral3Config(
        vision_config={"model_type": "pixtral", **_TOWER, **_HEAD},
        text_config=_text("mistral4", **_LATENT),
        image_token_index=IMAGE_ID,
    ),
    "qwen2_vl": lambda: Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
        text_config=_text("qwen2_vl_text", **_M_ROPE),
        **_VIDEO,
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        vision_config=_OUT, text_config=_text("qwen2_5_vl_text", **_M_ROPE), tie_word_embeddings=True, **_VIDEO
    ),
    "qwen3_vl": lambda: Qwen3VLConfig(
        vision_config=_OUT | {"deepstack_visual_indexes": [0]},
        text_config=_text("qwen3_vl_text", **_M_ROPE, **_HEAD),
        **_VIDEO,
    ),
    "qwen3_vl_moe": lambda: Qwen3VLMoeConfig(
        vision_config=_OUT | {"deepstack_visual_indexes": [0]},
        text_config=_text(
            "qwen3_vl_moe_text", **_M_ROPE, **_HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
        ),
        **_VIDEO,
    ),
    "gemma3": lambda: Gemma3Config(
        vision_config=_SIGLIP,
        text_config=_text("gemma3_text", **_WINDOWS, **_HEAD, query_pre_attn_scalar=16),
        image_token_index=IMAGE_ID,
        mm_tokens_per_image=4,
    ),
    "gemma4": lambda: Gemma4Config(
        vision_config={**_TOWER, **_HEAD},
        audio_config=None,
        text_config=_text(
            "gemma4_text",
            **_WINDOWS,
            **_HEAD,
            global_head_dim=32,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=101,
        ),
        image_token_id=IMAGE_ID,
    ),
    "gemma3n": lambda: Gemma3nConfig(
        text_config=_text(
            "gemma3n_text",
            **_HEAD,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"] * 2,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            laurel_rank=8,
            altup_num_inputs=2,
            hidden_size_per_layer_input=16,
            vocab_size_per_layer_input=101,
            activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        ),
        image_token_id=IMAGE_ID,
    ),
    "gemma4_unified": lambda: Gemma4UnifiedConfig(
        vision_config={"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 32},
        audio_config=None,
        text_config=_text("gemma4_unified_text", **_WINDOWS, **_HEAD, global_head_dim=32),
        image_token_id=IMAGE_ID,
    ),
    "llama4": lambda: Llama4Config(
        vision_config={**_TOWER, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
        text_config=_text(
            "llama4_text",
            **_HEAD,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=16,
            no_rope_layers=[1, 0],
            floor_scale=8,
        ),
        image_token_index=IMAGE_ID,
    ),
    "internvl": lambda: InternVLConfig(
        vision_config={"model_type": "internvl_vision", **_TOWER, "image_size": [16, 16], "patch_size": [8, 8]},
        text_config=_text("qwen2"),
        image_token_id=IMAGE_ID,
    ),
    "idefics3": lambda: Idefics3Config(vision_config=_TOWER, text_config=_text("llama"), image_token_id=IMAGE_ID),
    "smolvlm": lambda: SmolVLMConfig(vision_config=_TOWER, text_config=_text("llama"), image_token_id=IMAGE_ID),
    "lfm2_vl": lambda: Lfm2VlConfig(
        vision_config={"model_type": "siglip2_vision_model", **_TOWER},
        text_config=_text("lfm2", block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"]),
        image_token_id=IMAGE_ID,
    ),
    "glm4v": lambda: Glm4vConfig(
        vision_config=_OUT | {"image_size": 16}, text_config=_text("glm4v_text", **_M_ROPE), **_VIDEO
    ),
    "glm46v": lambda: Glm46VConfig(
        vision_config={"model_type": "glm4v_vision", **_OUT, "image_size": 16},
        text_config=_text("glm4v_text", **_M_ROPE),
        **_VIDEO,
    ),
    "glm4v_moe": lambda: Glm4vMoeConfig(
        vision_config=_OUT | {"image_size": 16},
        text_config=_text(
            "glm4v_moe_text",
            **_M_ROPE,
            head_dim=32,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            first_k_dense_replace=1,
        ),
        **_VIDEO,
    ),
    "glm_ocr": lambda: GlmOcrConfig(
        vision_config=_OUT | {"image_size": 16}, text_config=_text("glm_ocr_text", **_M_ROPE, head_dim=32), **_VIDEO
    ),
    "exaone4_5": lambda: Exaone4_5_Config(
        vision_config=_OUT | {"num_key_value_heads": 1}, text_config=_text("exaone4", **_WINDOWS), **_VIDEO
    ),
    "kimi_k25": lambda: Kimi_K25Config(
        vision_config={**_TOWER, "pos_emb_height": 2, "pos_emb_width": 2},
        text_config=_text("deepseek_v3", **_LATENT),
        image_token_id=IMAGE_ID,
    ),
    "lfm3_vl": lambda: Lfm3VlConfig(
        vision_config=_TOWER,
        text_config=_text("lfm3", **_HEAD, sliding_window=9, layer_types=["conv", "sliding_attention"]),
        image_token_id=IMAGE_ID,
    ),
    "aria": lambda: AriaConfig(
        vision_config={"model_type": "idefics3_vision", **_TOWER},
        text_config=_text("aria_text", moe_num_experts=4, moe_topk=2),
        projector_patch_to_query_dict={4: 2},
        image_token_index=IMAGE_ID,
    ),
    "deepseek_vl": lambda: DeepseekVLConfig(vision_config=_SIGLIP, text_config=_text("llama"), image_token_id=IMAGE_ID),
    "llava_next_video": lambda: LlavaNextVideoConfig(
        vision_config=_CLIP,
        text_config=_text("llama"),
        **_INDICES,
    ),
    "vipllava": lambda: VipLlavaConfig(
        vision_config=_CLIP,
        text_config=_text("llama"),
        vision_feature_layers=[-1],
        image_token_index=IMAGE_ID,
    ),
    "qwen3_5": lambda: Qwen3_5Config(
        vision_config=_OUT,
        text_config=_text("qwen3_5_text", **_HYBRID),
        **_VIDEO,
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        vision_config=_OUT,
        text_config=_text(
            "qwen3_5_moe_text",
            **_HYBRID,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=48,
        ),
        **_VIDEO,
    ),
    "qwen2_audio": lambda: Qwen2AudioConfig(
        audio_config={
            "d_model": 32,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            **_SOUND,
        },
        text_config=_text("qwen2"),
        audio_token_index=IMAGE_ID,
    ),
    "voxtral": lambda: VoxtralConfig(
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            **_SOUND,
        },
        text_config=_text("llama"),
        audio_token_id=IMAGE_ID,
    ),
}
