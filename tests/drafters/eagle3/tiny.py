"""Tiny random draft layers."""

import json

import torch
from safetensors.torch import save_file

from betoken.drafters.eagle3.module import make_layer
from betoken.drafters.eagle3.shape import EagleShape

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tiny_shape(**fields):
    """For a target of 101 ids, 64 wide."""
    return EagleShape(
        **{
            "version": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 101,
            "draft_vocab_size": 40,
            "target_hidden_size": 64,
            "max_context": 640,
        }
        | fields
    )


def tiny_layer(shape, seed=0, spread=0.25, dtype=torch.float32):
    """A layer with random weights of that spread; its ids are spread over the target's."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(shape)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 and "bias" not in name else spread * noise)
    if shape.version == 3:
        chosen = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
        layer.d2t.copy_(chosen - torch.arange(len(chosen)))
        layer.t2d.zero_()[chosen] = True
    return layer.to(dtype).eval().requires_grad_(False)


def config_of(shape, layout):
    """The config.json of a layout."""
    layer = {
        "model_type": "llama",
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
    }
    draft = {"target_hidden_size": shape.target_hidden_size, "draft_vocab_size": shape.draft_vocab_size}
    draft |= {flag: True for flag in FLAGS if getattr(shape, flag)}
    if shape.version == 1:
        return layer | {"bias": shape.has_fc_bias}
    if layout == "speculators":
        is_parallel = shape.mask_token_id is not None
        return (
            draft
            | ({"mask_token_id": shape.mask_token_id} if is_parallel else {})
            | {
                "architectures": ["PEagleSpeculator" if is_parallel else "Eagle3Speculator"],
                "speculators_model_type": "peagle" if is_parallel else "eagle3",
                "speculators_version": "0.9.0",
                "eagle_aux_hidden_state_layer_ids": None if shape.state_layers is None else list(shape.state_layers),
                "speculators_config": {
                    "algorithm": "eagle3",
                    "verifier": {"name_or_path": shape.base, "architectures": []},
                },
                "transformer_layer_config": layer,
            }
        )
    if shape.mask_token_id is not None:
        draft |= {"parallel_drafting": True, "ptd_token_id": shape.mask_token_id}
    eagle = {"eagle_aux_hidden_state_layer_ids": list(shape.state_layers or ()), "use_aux_hidden_state": True}
    named = {"architectures": ["LlamaForCausalLMEagle3"]} if layout == "specforge" else {}
    return layer | draft | named | ({"eagle_config": eagle} if shape.state_layers else {})


def tensors_of(layer, layout, embedding=None):
    """The tensors of a layout, by name."""
    tensors = dict(layer.state_dict())
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if layout == "prefixed":
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    return tensors | ({} if embedding is None else {"embed_tokens.weight": embedding})


def save_layer(directory, layer, layout="specforge", embedding=None):
    """A checkpoint in that layout: `safeailab` (pickled), `specforge`, `prefixed`, `speculators`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(layer.shape, layout)))
    tensors = tensors_of(layer, layout, embedding)
    if layout == "safeailab":
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
