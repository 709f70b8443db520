"""The two Llama shapes of the pair, how they are initialised and how they are saved.

Knows shapes and files; it knows no data and no training.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from betoken.training.tokenizer import END_OF_TEXT_ID, VOCAB_SIZE

MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama decoder with tied embeddings."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_size: int
    vocab_size: int = VOCAB_SIZE
    max_positions: int = MAX_POSITIONS

    def config(self) -> LlamaConfig:
        """The `transformers` configuration of this shape."""
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.hidden_size // self.num_heads,
            intermediate_size=self.mlp_size,
            max_position_embeddings=self.max_positions,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
        )


TARGET = Shape(hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=2, mlp_size=1024)
DRAFT = Shape(hidden_size=128, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=384)


def build_model(shape: Shape, seed: int) -> Any:
    """A freshly initialised float32 model whose residual branches start at zero, so that at first it is its embedding
    alone."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(shape.config())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return model


@functools.cache
def _faster_cpu_dtype() -> torch.dtype:
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(512, 512, dtype=dtype)
        durations = []
        for _ in range(4):  # the first also prepares the product
            start = time.perf_counter()
            torch.mm(matrix, matrix)
            durations.append(time.perf_counter() - start)
        seconds[dtype] = min(durations)
    return min(seconds, key=lambda dtype: seconds[dtype])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def product_dtype(device_type: str) -> torch.dtype:
    """The type of matrix products in training: bfloat16, or float32 if that is faster on this processor.

    Measured once in a process: processors that only emulate bfloat16 take five times as long with it, and torch cannot
    distinguish them.
    """
    return _faster_cpu_dtype() if device_type == "cpu" else torch.bfloat16


def logits_of(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, V]` of a forward without a cache; matrix products in `product_dtype`."""
    device_type = input_ids.device.type
    uses_bfloat16 = product_dtype(device_type) == torch.bfloat16
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=uses_bfloat16):
        logits: torch.Tensor = model(input_ids=input_ids, use_cache=False).logits
    return logits


def num_parameters(model: Any) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_model(model: Any, folder: Path) -> None:
    """Write bfloat16 safetensors, config.json and a neutral generation_config.json; `model` is left as it is."""
    shipped: Any = LlamaForCausalLM(model.config)
    shipped.to(torch.bfloat16)
    shipped.load_state_dict(model.state_dict())
    shipped.config.dtype = torch.bfloat16
    neutral: Any = GenerationConfig
    shipped.generation_config = neutral(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=END_OF_TEXT_ID, pad_token_id=END_OF_TEXT_ID
    )
    shipped.save_pretrained(folder)
