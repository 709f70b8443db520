"""Models of a stated shape with random weights, made on the device: a step's time does not ask what they say."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from betoken.engine.attention import ATTENTION_NAME, register_attention
from betoken.engine.weights.loading import ModelInfo

MODEL_NAMES = ("llama-3-8b", "llama-3-1b")

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


def share_weights(model: Any) -> Any:
    """The same model once more over the same weights, as transformers runs it."""
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
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def read_bytes(model: Any) -> int:
    """Bytes of the weights that a forward reads. An embedding table counts only where it is the output's too."""
    total: int = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    table: torch.Tensor = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is table
    return total if is_tied else total - table.numel() * table.element_size()
