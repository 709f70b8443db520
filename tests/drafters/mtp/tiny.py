"""Tiny random targets whose checkpoints hold an MTP layer, in the published layouts."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BailingHybridConfig,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    NemotronHConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.3,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
CHOSEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOW = {"head_dim": 8, "sliding_window": 9, "layer_types": ["full_attention", "sliding_attention"]}
CONFIGS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **HYBRID, mtp_num_hidden_layers=1),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **SIZES, **HYBRID, **CHOSEN, shared_expert_intermediate_size=16, mtp_num_hidden_layers=1
    ),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **HYBRID, **CHOSEN, shared_expert_intermediate_size=16),
    "deepseek_v3": lambda: DeepseekV3Config(**SIZES | LATENT, **EXPERTS),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**SIZES | LATENT, **EXPERTS),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **SIZES | LATENT,
        **CHOSEN,
        head_dim=16,
        num_expert_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        layer_types=["linear_attention", "full_attention"],
    ),
    "mellum": lambda: MellumConfig(**SIZES, **WINDOW, **CHOSEN, num_nextn_predict_layers=1),
    "mimo_v2_flash": lambda: MiMoV2FlashConfig(
        **SIZES, **WINDOW, **EXPERTS, v_head_dim=4, mlp_layer_types=["sparse", "dense"]
    ),
}
QWEN = {"fc": "mtp.fc", "e": "mtp.pre_fc_norm_embedding", "h": "mtp.pre_fc_norm_hidden", "norm": "mtp.norm"}
DEEPSEEK = {"fc": "eh_proj", "e": "enorm", "h": "hnorm", "norm": "shared_head.norm"}
MIMO = DEEPSEEK | {"norm": "final_layernorm"}
MIMO_NAMES = {"post_attention_layernorm": "pre_mlp_layernorm", "self_attn.sinks": "self_attn.attention_sink_bias"}


def save_target(folder: Path, name: str, vocab_size: int = 101, num_layers: int = 1, **changes: object) -> Path:
    """Write the target of that name with so many MTP layers; see `add_layer`."""
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.vocab_size = vocab_size
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for index in range(num_layers):
        add_layer(folder, index=index, **changes)
    return folder


def save_nemotron(folder: Path, vocab_size: int = 101, **changes: object) -> Path:
    """Write a Nemotron-H target with its MTP layer of two blocks; `changes` to the configuration."""
    torch.manual_seed(0)
    config = NemotronHConfig(
        **SIZES | {"vocab_size": vocab_size, "num_hidden_layers": 3},
        head_dim=8,
        layers_block_type=["linear_attention", "full_attention", "moe"],
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=8,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        num_nextn_predict_layers=1,
        **changes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(7)
    stored, added = load_file(path), {}
    for place, block in enumerate((1, 2)):
        for name, old in stored.items():
            if f".layers.{block}." in name:
                rest = name.partition(f".layers.{block}.")[2]
                added[f"mtp.layers.{place}.{rest}"] = torch.randn(old.shape, generator=generator) * 0.3
    size = config.hidden_size
    added["mtp.layers.0.eh_proj.weight"] = torch.randn(size, 2 * size, generator=generator) * 0.3
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        added[f"mtp.layers.{name}.weight"] = 1 + torch.randn(size, generator=generator) * 0.3
    save_file(stored | added, path, {"format": "pt"})
    return folder


def add_layer(
    folder: Path,
    without: Iterable[str] = (),
    more: Mapping[str, Tensor] | None = None,
    spread: float = 0.3,
    index: int = 0,
) -> None:
    """Add an MTP layer to the checkpoint: a random decoder layer of the kind of the target's last.

    Args:
        without: names of tensors that are left out.
        more: further tensors, or other ones.
        index: of the layer among the MTP layers.
    """
    config, path = AutoConfig.from_pretrained(folder), folder / "model.safetensors"
    stored, count, size = load_file(path), config.num_hidden_layers, config.hidden_size
    is_qwen, is_mimo = config.model_type.startswith(("qwen", "mellum")), config.model_type.startswith("mimo")
    place = (
        "mtp.layers.0." if is_qwen else f"model.mtp.layers.{index}." if is_mimo else f"model.layers.{count + index}."
    )
    names = QWEN if is_qwen else {key: place + name for key, name in (MIMO if is_mimo else DEEPSEEK).items()}
    generator = torch.Generator().manual_seed(7 + index)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * spread

    last = f"model.layers.{count - 1}."
    added = {place + name.removeprefix(last): draw(*old.shape) for name, old in stored.items() if name.startswith(last)}
    if config.model_type != "qwen3_5_moe_text":
        for name in [name for name in added if ".experts." in name and "weight" not in name]:
            added |= _by_expert(name, added.pop(name))
    for own, published in MIMO_NAMES.items() if is_mimo else ():
        added = {name.replace(own, published): tensor for name, tensor in added.items()}
    added |= {f"{names['fc']}.weight": draw(size, 2 * size)}
    added |= {f"{names[key]}.weight": draw(size) + (config.model_type[:4] != "qwen") for key in ("e", "h", "norm")}
    if not is_qwen and not is_mimo:
        added[f"{place}embed_tokens.weight"] = draw(config.vocab_size, size)
        added[f"{place}shared_head.head.weight"] = draw(config.vocab_size, size)
    added |= more or {}
    save_file(stored | {name: t for name, t in added.items() if name not in set(without)}, path, {"format": "pt"})


def _by_expert(name: str, weight: Tensor) -> dict[str, Tensor]:
    """The weights of all experts as published checkpoints have them; transformers stacks them."""
    path, _, kind = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    return {
        f"{path}.{expert}.{part}.weight": piece.clone()
        for expert, own in enumerate(weight)
        for part, piece in zip(parts, own.chunk(len(parts)), strict=True)
    }
