"""Tiny mixtures stored in MXFP4, as gpt-oss on the hub, or in blocks of FP8, and the same numbers stored dense."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.quantized_files import gptq_config, store_gptq
from tests.engine.tiny import save_tiny

# Open Compute Project, Microscaling Formats v1.0: E2M1 numbers, 32 of which share a power of two (bias 127).
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


def draw_experts(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [E, K, N], and what a checkpoint stores of them: blocks [E, N, K / 32, 16], scales [E, N, K / 32]."""
    num_experts, num_inputs, num_outputs = shape
    lead = (num_experts, num_outputs, num_inputs // GROUP)
    codes = torch.randint(16, (*lead, GROUP), generator=generator)
    scales = torch.randint(121, 126, lead, generator=generator)
    numbers = NUMBERS[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales[..., None] - 127)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first of two in the low half of a byte
    return numbers.flatten(2).transpose(1, 2).contiguous(), blocks.byte(), scales.byte()


def store_mxfp4(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Content of a checkpoint; the experts' weights become their dequantised numbers."""
    stored, generator = dict(weights), torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[name], stored[f"{name}_blocks"], stored[f"{name}_scales"] = draw_experts(weights[name].shape, generator)
        del stored[name]
    return stored


def store_fp8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linear layers in FP8 (E4M3), one scale for 16 by 16 weights."""
    stored = dict(weights)
    for name in [name for name in weights if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]:
        num_outputs, num_inputs = weights[name].shape
        blocks = weights[name].float().reshape(num_outputs // 16, 16, num_inputs // 16, 16)
        scales = blocks.abs().amax((1, 3)) / 448
        numbers = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name] = (numbers.float() * scales[:, None, :, None]).reshape(num_outputs, num_inputs)
        stored[name], stored[f"{name}_scale_inv"] = numbers.reshape(num_outputs, num_inputs), scales
    return stored


def store_ordered(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPTQ with 4 bits and input orders that differ from expert to expert."""
    stored = dict(weights)
    layers = [name for name in weights if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))]
    for name in layers:
        expert = re.search(r"experts\.(\d+)\.w(\d)", name)
        seed = 2 if expert is None else 10 * int(expert[1]) + (expert[2] == "2")
        tensors, weights[name] = store_gptq(4, 32, less=1, is_ordered=True, seed=seed)(weights[name])
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{part}": tensor.contiguous() for part, tensor in tensors.items()}
    return stored


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
ORDERED = gptq_config(4, 32, desc_act=True)
WAYS = [
    ("gpt_oss", store_mxfp4, {"quant_method": "mxfp4"}),
    ("mixtral", store_fp8, FP8),
    ("mixtral", store_ordered, ORDERED),
]


def save_both(family: str, store: Any, quantization: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """The numbers stored dense, float32, and quantised."""
    plain, packed = folder / "plain", folder / "packed"
    save_tiny(plain, family)
    packed.mkdir()
    weights = {name: weight.float() for name, weight in load_file(plain / "model.safetensors").items()}
    save_file(store(weights), packed / "model.safetensors", metadata={"format": "pt"})
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text()) | {"dtype": "float32"}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return plain, packed
