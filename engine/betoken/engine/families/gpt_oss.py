"""gpt-oss: GGUF files."""

from betoken.engine.families.family import Architecture, Family, Given


def _finish(given: Given) -> None:
    scaling = given.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling["truncate"] = False


_KEYS = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "intermediate_size",
}

GPT_OSS = Family(model_types=("gpt_oss",), gguf={"gpt-oss": Architecture("gpt_oss", "gpt_oss", _KEYS, _finish)})
