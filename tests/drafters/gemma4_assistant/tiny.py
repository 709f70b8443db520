"""Tiny random Gemma-4 targets, and assistants for them in the published layout."""

import json

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from betoken.drafters.gemma4_assistant.module import AssistantModel
from betoken.drafters.gemma4_assistant.shape import read_shape

LAYERS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def save_target(directory, kind="gemma4_text", vocab_size=100, spread=0.15, num_shared=2, seed=0):
    """A target of four layers, the last `num_shared` of which read keys of earlier ones."""
    own = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": vocab_size} if kind == "gemma4_text" else {}
    config = CONFIG_MAPPING[kind](
        **LAYERS, **own, vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=num_shared,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=spread)
    model.save_pretrained(directory)
    return str(directory)


def config_of(kind="gemma4_assistant", vocab_size=100, num_centroids=0):
    """The published config.json."""
    return {
        "model_type": kind,
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": num_centroids > 0,
        "num_centroids": num_centroids or 2048,
        "centroid_intermediate_top_k": max(1, num_centroids // 4),
        "tie_word_embeddings": True,
        "text_config": LAYERS
        | {
            "model_type": "gemma4_unified_text" if "unified" in kind else "gemma4_text",
            "vocab_size": vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1000000.0,
                },
            },
        },
    }


def tensors_of(config, seed=1, spread=0.25):
    """Random tensors by their published names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = AssistantModel(read_shape(config))
    tensors = {}
    for name, like in model.state_dict().items():
        noise = torch.randn(like.shape, generator=generator)
        is_inner = name.startswith(("layers.", "norm.", "embed_tokens."))
        tensors[f"model.{name}" if is_inner else name] = 1 + 0.3 * noise if like.dim() == 1 else spread * noise
    if config["use_ordered_embeddings"]:
        order = torch.randperm(config["text_config"]["vocab_size"], generator=generator)
        tensors["masked_embedding.token_ordering"] = order
    return tensors


def save_assistant(directory, config=None, tensors=None, **changes):
    """A checkpoint; `changes` go to `tensors_of`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config or config_of()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors or tensors_of(config, **changes), directory / "model.safetensors", {"format": "pt"})
    return directory
