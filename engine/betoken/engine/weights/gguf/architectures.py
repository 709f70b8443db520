"""The architectures of GGUF files that are served: what of a file's keys becomes which field of a configuration.

transformers' own tables come first. This adds the keys that llama.cpp writes and reads and those tables leave out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Given = dict[str, Any]
"""Fields of a configuration, as they are found."""

_HEAD_SIZE = {"attention.key_length": "head_dim"}
_FEWER_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob"}
_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores have another scale."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture."""

    model_type: str
    """The model type of transformers."""
    table: str | None = None
    """Name of its table in `GGUF_CONFIG_MAPPING`; None where transformers makes the configuration by a function."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration by the keys, below the architecture's, that the table leaves out."""
    finish: Callable[[Given], None] = lambda given: None
    """Sets what follows from other fields."""
    rope_tensors: tuple[str, ...] = ()
    """Names of tensors that hold a factor of every frequency."""


def _gpt2(given: Given) -> None:
    given["n_positions"], given["n_inner"] = given.get("n_ctx"), given.pop("feed_forward_length", None)


def _gemma(name: str) -> Callable[[Given], None]:
    def finish(given: Given) -> None:
        given["tie_word_embeddings"] = True
        is_largest = given["num_hidden_layers"] == _LARGEST_GEMMA[name]
        heads = given["hidden_size"] // given["num_attention_heads"]
        given["query_pre_attn_scalar"] = heads if is_largest else given["head_dim"]

    return finish


def _llama(given: Given) -> None:
    if not given.get("num_local_experts"):
        given.pop("num_local_experts", None), given.pop("num_experts_per_tok", None)
        return
    given["model_type"] = "mixtral"
    given.setdefault("rope_theta", 10_000.0)


def _phi3(given: Given) -> None:
    size = given.get("head_dim") or given["hidden_size"] // given["num_attention_heads"]
    given["partial_rotary_factor"] = given.pop("rotary_dim", size) / size


def _minimax(given: Given) -> None:
    given["use_routing_bias"] = True
    given.pop("scoring_func", None)


ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma2": Architecture("gemma2", "gemma2", _SOFTCAPS, _gemma("gemma2")),
    "gemma3": Architecture(
        "gemma3_text", "gemma3", {**_SOFTCAPS, "rope.freq_base_swa": "rope_local_base_freq"}, _gemma("gemma3")
    ),
    "gpt2": Architecture("gpt2", "gpt2", finish=_gpt2),
    "lfm2": Architecture("lfm2"),
    "llama": Architecture(
        "llama",
        "llama",
        {**_HEAD_SIZE, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        _llama,
        ("rope_freqs.weight",),
    ),
    "minimax-m2": Architecture(
        "minimax_m2", "minimax_m2", {"expert_feed_forward_length": "intermediate_size"}, _minimax
    ),
    "phi3": Architecture(
        "phi3",
        "phi3",
        {**_HEAD_SIZE, "attention.sliding_window": "sliding_window", "rope.dimension_count": "rotary_dim"},
        _phi3,
        ("rope_factors_long.weight", "rope_factors_short.weight"),
    ),
    "qwen2": Architecture("qwen2", "qwen2", _HEAD_SIZE),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "qwen2_moe",
        _HEAD_SIZE | _FEWER_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3": Architecture("qwen3", "qwen3", _HEAD_SIZE),
    "qwen35": Architecture("qwen3_5_text"),
    "qwen35moe": Architecture("qwen3_5_moe_text"),
    "qwen3moe": Architecture("qwen3_moe", "qwen3_moe", _FEWER_EXPERTS),
    "starcoder2": Architecture("starcoder2", "starcoder2", {**_HEAD_SIZE, "rope.freq_base": "rope_theta"}),
}
"""By `general.architecture`."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "pooling_type", "nextn_predict_layers"), (0,)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Keys that nothing reads, and the values that change nothing."""
GATES: Mapping[str, int] = {"qwen2moe": 1, "qwen3moe": 1, "minimax-m2": 2}
"""How routers turn scores into weights, `expert_gating_func`: 1 softmax, 2 sigmoid."""
DESCRIPTIVE = frozenset({"vocab_size", "tensor_data_layout"})
"""Keys that tell nothing that the tensors would not."""
