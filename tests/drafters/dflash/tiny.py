"""Tiny random block drafters."""

import json

import torch
from safetensors.torch import save_file

from betoken.drafters.dflash.module import BlockModel
from betoken.drafters.dflash.shape import BlockShape

FIELDS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6},
    "dspark": {
        "predicts_first": True,
        "markov_rank": 8,
        "has_confidence": True,
        "confidence_reads_markov": True,
    },
}


def tiny_shape(variant="dflash", **fields):
    """For a target of 101 ids, 64 wide."""
    return BlockShape(
        **{
            "variant": variant,
            "hidden_size": 64,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 101,
            "draft_vocab_size": 0,
            "target_hidden_size": 64,
            "max_context": 640,
            "block_size": 5,
            "mask_token_id": 100,
            "state_layers": (1, 2),
        }
        | FIELDS[variant]
        | fields
    )


def tiny_tensors(shape, seed=0, spread=0.25):
    """Random tensors by the names of z-lab's and DeepSpec's files."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = BlockModel(shape, shape.vocab_size, has_head=shape.variant == "dspark")
    tensors = {}
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if shape.variant == "dspark":
        sizes["embed_tokens.weight"] = torch.Size((shape.vocab_size, shape.hidden_size))
    for name, size in sizes.items():
        noise = torch.randn(size, generator=generator)
        is_norm = "norm" in name or name.endswith("base_kernel")
        name = name.removesuffix(".weight") if name.endswith("codebook.weight") else name
        tensors[name] = 1 + 0.3 * noise if is_norm else spread * noise
    return tensors


def config_of(shape, layout="published"):
    """The config.json of a variant's published layout, of `speculators`, or of `transformers`."""
    layer = {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "layer_types": ["sliding_attention" if shape.window else "full_attention"] * shape.num_layers,
        "sliding_window": shape.window or None,
    }
    layer_ids = [layer - 1 for layer in shape.state_layers]
    names = ("block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    own = {name: getattr(shape, name) for name in names if getattr(shape, name)}
    heads = {
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head_type,
        "enable_confidence_head": shape.has_confidence,
        "confidence_head_with_markov": shape.confidence_reads_markov,
    }
    if layout == "speculators":
        return (
            own
            | (heads if shape.variant == "dspark" else {})
            | {
                "speculators_model_type": shape.variant,
                "speculators_config": {"algorithm": shape.variant, "verifier": {"name_or_path": shape.base}},
                "aux_hidden_state_layer_ids": list(shape.state_layers),
                "draft_vocab_size": shape.draft_vocab_size or shape.vocab_size,
                "sliding_window_non_causal": not shape.is_causal,
                "transformer_layer_config": layer,
            }
        )
    if layout == "transformers":
        named = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
        return layer | named | own | {"target_layer_ids": layer_ids}
    if shape.variant == "dspark":
        return layer | heads | own | {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": layer_ids}
    own |= {"target_layer_ids": layer_ids}
    if shape.softcap:
        own |= {"final_logit_softcapping": shape.softcap, "output_multiplier": shape.output_multiplier}
    name = "DFlash2DraftModel" if shape.variant == "dflash2" else "DFlashDraftModel"
    return layer | {"architectures": [name], "dflash_config": own, "is_causal": shape.is_causal}


def save_block(directory, shape, layout="published", tensors=None, seed=0):
    """A checkpoint in that layout."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(shape, layout)))
    tensors = tiny_tensors(shape, seed) if tensors is None else tensors
    if layout == "transformers":
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
        tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
