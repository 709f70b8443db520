"""Models of a stated shape with random weights, made on the device: a step's time does not ask what they say."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from betoken.engine.attention import ATTENTION_NAME, register_attention
from betoken.engine.model_info import ModelInfo
from betoken.engine.weights.layers import GroupedLinear, grouped_bytes, num_grouped
from betoken.engine.weights.rounding import rounded
from betoken.kernels.linear_grouped import Grouped

MODEL_NAMES = ("llama-3-8b", "llama-3-1b")
WEIGHTS = ("bfloat16", "w4a16", "w8a16", "fp8")
"""How linear layers but the last are stored: as they are, in 4 bits by groups of 128, in 8 bits by outputs, in FP8 by
groups of 128."""
_GROUP = 128

_COMMON: dict[str, Any] = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "eos_token_id": 128001,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "llama-3-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
}


def shape_config(name: str, **changes: Any) -> LlamaConfig:
    """The configuration of a shape; `changes` override its settings."""
    return LlamaConfig(**(_COMMON | _SHAPES[name] | changes))


def make_model(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """A transformers model with our attention; `changes` override the shape's settings."""
    register_attention()
    with device:
        make: Callable[..., Any] = AutoModelForCausalLM.from_config
        model = make(shape_config(name, **changes), dtype=dtype, attn_implementation=ATTENTION_NAME)
    return model.eval().requires_grad_(False)


def round_weights(model: Any, weights: str) -> None:
    """Put grouped layers in the place of a model's linear ones but the last, without a change for `bfloat16`."""
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if isinstance(layer, torch.nn.Linear) and layer is not head and weights != "bfloat16":
            model.set_submodule(path, GroupedLinear(rounded_weight(weights, layer.weight.data), layer.bias))


def rounded_weight(weights: str, weight: torch.Tensor) -> Grouped:
    """A weight [N, K] float as one of `WEIGHTS` stores it."""
    num_inputs = weight.shape[1]
    if weights == "w4a16":
        return rounded("int4", weight, _GROUP)
    if weights == "w8a16":
        return rounded("int8", weight, -(-num_inputs // 32) * 32)
    parts = torch.nn.functional.pad(weight.float(), (0, -num_inputs % _GROUP)).reshape(len(weight), -1, _GROUP)
    scales = parts.abs().amax(2) / 448
    codes = (parts / scales[..., None]).flatten(1)[:, :num_inputs].to(torch.float8_e4m3fn)
    return Grouped("float8", num_inputs, _GROUP, codes.contiguous(), scales)


def share_weights(model: Any) -> Any:
    """A second instance of the model over the same weights, as transformers runs it."""
    twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    twin.set_attn_implementation("sdpa")
    return twin


def describe(name: str, model: Any) -> ModelInfo:
    """The config of such a checkpoint."""
    return ModelInfo(
        model_id=f"random {name}",
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_position_embeddings,
        eos_token_ids=(model.config.eos_token_id,),
        default_sampling={},
        weights_fingerprint="",
        tokenizer_hash="",
        num_parameters=sum(parameter.numel() for parameter in model.parameters()) + num_grouped(model),
    )


def read_bytes(model: Any) -> int:
    """Bytes of the weights that a forward reads. An embedding table counts only if it is tied to the output layer."""
    total: int = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    total += grouped_bytes(model)
    table: torch.Tensor = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is table
    return total if is_tied else total - table.numel() * table.element_size()
