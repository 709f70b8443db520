"""Qwen2 and Qwen3, dense and with experts, and the text of multimodal ones. Hybrids are in `qwen_hybrid`."""

from betoken.engine.families.family import Architecture, Family
from betoken.engine.mixers.attention import state_window

_HEAD_SIZE = {"attention.key_length": "head_dim"}
_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob"}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}

QWEN2 = Family(
    model_types=("qwen2", "qwen2_moe"),
    multimodal=("qwen2_audio",),
    bindings={"Qwen2MoeAttention": state_window},
    gguf={
        "qwen2": Architecture("qwen2", "qwen2", _HEAD_SIZE),
        "qwen2moe": Architecture("qwen2_moe", "qwen2_moe", _HEAD_SIZE | _EXPERTS | _SHARED, expert_gate=1),
    },
)

QWEN3 = Family(
    model_types=("qwen3", "qwen3_moe"),
    gguf={
        "qwen3": Architecture("qwen3", "qwen3", _HEAD_SIZE),
        "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", _EXPERTS, expert_gate=1),
    },
)

QWEN_VL = Family(
    model_types=("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    multimodal=("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    converted_as={"qwen3_vl_moe_text": "qwen3_vl_moe"},
    towers=("visual.", "model.visual."),
)
