"""Llama, and Mixtral as llama.cpp names it."""

from betoken.engine.families.family import Architecture, Family, Given


def _finish(given: Given) -> None:
    if not given.get("num_local_experts"):
        given.pop("num_local_experts", None), given.pop("num_experts_per_tok", None)
        return
    given["model_type"] = "mixtral"
    given.setdefault("rope_theta", 10_000.0)


_KEYS = {
    "attention.key_length": "head_dim",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}

LLAMA = Family(
    model_types=("llama", "mixtral"),
    multimodal=("deepseek_vl", "idefics3", "smolvlm", "vipllava", "voxtral"),
    gguf={"llama": Architecture("llama", "llama", _KEYS, _finish, ("rope_freqs.weight",))},
)
