"""Tiny GGUF files of every architecture that is served, with the names, orders and keys of llama.cpp's converter.

Source: llama.cpp, convert_hf_to_gguf.py. Nothing here reads the tables of the engine or of transformers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.engine.gguf_files import TOKENS, add_key, add_tokenizer, close, permuted, write_tensor

TYPES = {"token_embd": "Q8_0", "output": "Q8_0", "ffn_down_exps": "Q4_0", "ffn_down": "Q4_0"}
"""Types of quantised weights other than Q4_1."""
MXFP4_EXPERTS = {"gpt-oss": dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")}
"""Further ones by architecture."""
DENSE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "shortconv.conv", "ssm_conv1d")
"""Matrices that llama.cpp leaves in float32."""

Fields = Callable[[Any], dict[str, Any]]
Move = Callable[[Any, str, Tensor], Tensor]
"""The configuration, a tensor's name in the file, its numbers in the model -> in the file."""

_COMMON = {
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    **dict.fromkeys(("bos_token_id", "eos_token_id"), 0),
    "pad_token_id": None,
}
_ORIGINAL = {"original_max_position_embeddings": 64}
_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
        "mrope_interleaved": True,
    },
}


@dataclass(frozen=True)
class Family:
    """One architecture."""

    model_type: str
    config: dict[str, Any]
    keys: Fields
    moved: Move = lambda config, name, numbers: numbers


def _usual(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _rms(config: Any) -> dict[str, Any]:
    return _usual(config) | {"attention.layer_norm_rms_epsilon": config.rms_norm_eps}


def _heads(config: Any) -> dict[str, Any]:
    return dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)


def _gpt_oss(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return (
        _rms(config)
        | _heads(config)
        | {"attention.sliding_window": config.sliding_window, "expert_feed_forward_length": config.intermediate_size}
        | {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
        | {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        | {"rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    )


def _rotary(config: Any) -> dict[str, Any]:
    return {"rope.dimension_count": config.head_dim, "vocab_size": config.vocab_size}


def _gemma(config: Any) -> dict[str, Any]:
    softcap = config.final_logit_softcapping
    keys = _rms(config) | _heads(config) | {"attention.sliding_window": config.sliding_window}
    return keys | ({} if softcap is None else {"final_logit_softcapping": softcap})


def _gemma2(config: Any) -> dict[str, Any]:
    keys = _gemma(config) | {"attn_logit_softcapping": config.attn_logit_softcapping}
    del keys["rope.freq_base"]
    return keys


def _experts(config: Any) -> dict[str, Any]:
    return {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}


def _gpt2(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layer,
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def _lfm2(config: Any) -> dict[str, Any]:
    counts = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    more = {"attention.layer_norm_rms_epsilon": config.norm_eps, "shortconv.l_cache": config.conv_L_cache}
    return _usual(config) | more | {"attention.head_count_kv": counts, "vocab_size": config.vocab_size}


def _phi3(config: Any) -> dict[str, Any]:
    keys = _rms(config) | {
        "rope.dimension_count": int(16 * config.rope_parameters["partial_rotary_factor"]),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
    }
    factor = config.rope_parameters.get("attention_factor")
    keys |= {} if factor is None else {"rope.scaling.attn_factor": factor}
    return keys | ({} if config.sliding_window is None else {"attention.sliding_window": config.sliding_window})


def _qwen35(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    return (
        _rms(config)
        | _heads(config)
        | {
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
            "rope.dimension_sections": [*rope["mrope_section"], 0],
            "full_attention_interval": 2,
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }
    )


def _of_llama(config: Any, name: str, numbers: Tensor) -> Tensor:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return permuted(numbers, heads.get(name.split(".")[-2]))


def _plus_one(config: Any, name: str, numbers: Tensor) -> Tensor:
    return numbers + 1 if name.endswith("norm.weight") else numbers


def _transposed(config: Any, name: str, numbers: Tensor) -> Tensor:
    is_linear = name.endswith(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"))
    return numbers.T.contiguous() if is_linear else numbers


def _of_gpt_oss(config: Any, name: str, numbers: Tensor) -> Tensor:
    return numbers.transpose(1, 2) if numbers.dim() == 3 else numbers


def _of_lfm2(config: Any, name: str, numbers: Tensor) -> Tensor:
    return numbers.squeeze(1) if name.endswith("shortconv.conv.weight") else numbers


def _of_qwen35(config: Any, name: str, numbers: Tensor) -> Tensor:
    """Value heads grouped by key head become interleaved over key heads."""
    width, keys = config.linear_value_head_dim, config.linear_num_key_heads
    first = 2 * keys * config.linear_key_head_dim

    def in_turns(numbers: Tensor, size: int) -> Tensor:
        return numbers.reshape(keys, -1, size, *numbers.shape[1:]).transpose(0, 1).reshape(numbers.shape)

    if name.endswith("ssm_norm.weight"):
        return numbers
    if "attn_qkv" in name or "ssm_conv1d" in name:
        numbers = numbers.squeeze(1) if numbers.dim() == 3 else numbers
        return torch.cat([numbers[:first], in_turns(numbers[first:], width)])
    if "attn_gate" in name:
        return in_turns(numbers, width)
    if "ssm_out" in name:
        return in_turns(numbers.T, width).T.contiguous()
    if name.endswith("ssm_a"):
        return in_turns(-numbers.exp(), 1)
    if "ssm_dt" in name or "ssm_alpha" in name or "ssm_beta" in name:
        return in_turns(numbers, 1)
    return _plus_one(config, name, numbers)


_MOE = {"num_experts": 4, "num_experts_per_tok": 2}

FAMILIES: dict[str, Family] = {
    "gemma2": Family(
        "gemma2",
        {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 9}
        | {"tie_word_embeddings": True},
        _gemma2,
        _plus_one,
    ),
    "gemma3": Family(
        "gemma3_text",
        {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 9}
        | {"tie_word_embeddings": True, "num_hidden_layers": 6},
        _gemma,
        _plus_one,
    ),
    "gpt2": Family(
        "gpt2",
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024, "tie_word_embeddings": True},
        _gpt2,
        _transposed,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False} | _ORIGINAL},
        _gpt_oss,
        _of_gpt_oss,
    ),
    "lfm2": Family(
        "lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}, _lfm2, _of_lfm2
    ),
    "llama": Family(
        "llama", {"head_dim": 32}, lambda config: _rms(config) | _heads(config) | _rotary(config), _of_llama
    ),
    "minimax-m2": Family(
        "minimax_m2",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 16},
        lambda config: (
            _rms(config)
            | _heads(config)
            | {"rope.dimension_count": 16, "expert_gating_func": 2, "expert_count": 4, "expert_used_count": 2}
            | {"expert_feed_forward_length": config.intermediate_size}
        ),
    ),
    "phi3": Family("phi3", {}, _phi3),
    "qwen2": Family("qwen2", {}, _rms),
    "qwen2moe": Family(
        "qwen2_moe",
        _MOE | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        lambda config: (
            _rms(config)
            | _experts(config)
            | {"expert_feed_forward_length": 1408, "expert_shared_feed_forward_length": 5632}
        ),
        lambda config, name, numbers: numbers.squeeze(0) if "gate_inp_shexp" in name else numbers,
    ),
    "qwen3": Family("qwen3", {"head_dim": 128}, lambda config: _rms(config) | _heads(config)),
    "qwen35": Family("qwen3_5_text", _GATED_DELTA, _qwen35, _of_qwen35),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        _GATED_DELTA | _MOE | {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
        lambda config: (
            _qwen35(config)
            | _experts(config)
            | {"expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 96}
        ),
        lambda config, name, numbers: (
            numbers.squeeze(0) if "gate_inp_shexp" in name else _of_qwen35(config, name, numbers)
        ),
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        _MOE | {"head_dim": 32, "moe_intermediate_size": 768, "norm_topk_prob": True},
        lambda config: _rms(config) | _heads(config) | _experts(config) | {"expert_feed_forward_length": 768},
    ),
    "starcoder2": Family(
        "starcoder2",
        {"tie_word_embeddings": True},
        lambda config: _usual(config) | {"attention.layer_norm_epsilon": config.norm_epsilon},
    ),
}
"""By the name of the architecture. Where transformers reads no key of it, the configuration has the number that
transformers has there."""


def family_model(architecture: str, model_type: str | None = None, **changes: Any) -> Any:
    """A random model of the architecture, or of another type; `changes` to its configuration."""
    family = FAMILIES[architecture]
    is_gpt2 = architecture == "gpt2"
    usual = {name: value for name, value in _COMMON.items() if not is_gpt2 or "token" in name or name == "vocab_size"}
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[model_type or family.model_type](**usual | family.config | changes)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "bias", "A_log")):
                parameter.add_(torch.randn_like(parameter) / 8)
            elif parameter.dim() > 1:
                parameter.normal_(std=0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model.eval()


def write_family(
    path: Path,
    architecture: str,
    model: Any,
    is_dense: bool = False,
    changes: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """Write the model; `changes` to the keys below the architecture's, `more` are tensors, or numbers and a type.
    Returns the path."""
    family, config = FAMILIES[architecture], model.config
    keys = {**family.keys(config), **(changes or {})}
    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is not None:
            add_key(writer, f"{architecture}.{key}", value)
    add_tokenizer(writer)
    add_key(writer, "tokenizer.ggml.padding_token_id", 1)
    for name, numbers in _tensors(architecture, model):
        numbers = family.moved(config, name, numbers).contiguous()
        own = name.split(".", 2)[-1] if name.startswith("blk.") else name
        stem = own.removesuffix(".weight")
        types = TYPES | MXFP4_EXPERTS.get(architecture, {})
        is_plain = is_dense or numbers.dim() < 2 or stem in DENSE or stem.endswith("bias")
        type_name = "F32" if is_plain else types.get(stem, "Q4_1")
        write_tensor(writer, name, numbers.numpy(), type_name)
    for name, numbers in more.items():
        if isinstance(numbers, tuple):
            write_tensor(writer, name, *numbers)
        else:
            writer.add_tensor(name, numbers)
    close(writer)
    return str(path)


def _tensors(architecture: str, model: Any) -> Iterator[tuple[str, Tensor]]:
    """The model's weights by the names in the file."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    for name, numbers in model.state_dict().items():
        layer = next((f"blk.{part}" for part in name.split(".") if part.isdigit()), "")
        stem, _, suffix = name.rpartition(".")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")) and architecture == "gpt-oss":
            suffix = "bias" if name.endswith("bias") else "weight"
            yield f"{layer}.ffn_gate_exps.{suffix}", numbers[..., ::2]
            yield f"{layer}.ffn_up_exps.{suffix}", numbers[..., 1::2]
        elif name.endswith("experts.down_proj_bias"):
            yield f"{layer}.ffn_down_exps.bias", numbers
        elif name.endswith("sinks"):
            yield f"{layer}.attn_sinks.weight", numbers
        elif name.endswith("experts.gate_up_proj"):
            gate, up = numbers.chunk(2, dim=1)
            yield f"{layer}.ffn_gate_exps.weight", gate
            yield f"{layer}.ffn_up_exps.weight", up
        elif name.endswith("experts.down_proj"):
            yield f"{layer}.ffn_down_exps.weight", numbers
        elif name.endswith("e_score_correction_bias"):
            yield f"{layer}.exp_probs_b.bias", numbers
        elif name.endswith("A_log"):
            yield f"{layer}.ssm_a", numbers
        elif name.endswith("dt_bias"):
            yield f"{layer}.ssm_dt.bias", numbers
        else:
            yield f"{names.get_name(stem)}.{suffix}", numbers


def of_gpt_oss(path: str, model: Any) -> Any:
    """The model with the numbers of a file, in float32: transformers looks for other names of the experts' tensors."""
    reader = gguf.GGUFReader(path)
    found = {one.name: torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)) for one in reader.tensors}
    with torch.no_grad():
        for name, numbers in _tensors("gpt-oss", model):  # views of the model's own
            numbers.copy_(_of_gpt_oss(model.config, name, found[name]))
    return model
