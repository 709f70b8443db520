"""Qwen3-Next and Qwen3.5: layers of Gated DeltaNet between layers of attention."""

from betoken.engine.families.family import Architecture, Family
from betoken.engine.mixers.recurrences import gated_delta_rule

_RECURRENCES = {"torch_chunk_gated_delta_rule": gated_delta_rule}

QWEN3_NEXT = Family(
    model_types=("qwen3_next",),
    layer_types=frozenset({"linear_attention"}),
    recurrences=_RECURRENCES,
    draft_tensors=r"mtp\..*",
)

QWEN3_5 = Family(
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    multimodal=("qwen3_5", "qwen3_5_moe"),
    layer_types=frozenset({"linear_attention"}),
    recurrences=_RECURRENCES,
    towers=("visual.", "model.visual."),
    draft_tensors=r"mtp\..*",
    gguf={"qwen35": Architecture("qwen3_5_text"), "qwen35moe": Architecture("qwen3_5_moe_text")},
)

QWEN4 = Family(
    model_types=("qwen4_exp_text",),
    multimodal=("qwen4_exp",),
    refusal="its attention reads positions selected by a separate index",
)
