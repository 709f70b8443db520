"""Tiny Medusa heads written in every published layout, and what the paper says they compute."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

LAYOUTS = ("v1", "v1.pt", "v2", "v2.pt", "lorax", "vllm", "vllm-shared", "vllm-mapped")
"""FasterDecoding's layout in both versions and both kinds of file, an adapter as LoRAX takes it, vLLM's naming."""


class RandomHeads:
    """Weights of `num_heads` heads of `num_blocks` residual blocks."""

    def __init__(
        self, hidden_size: int, vocab_size: int, num_heads: int = 3, num_blocks: int = 1, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, scale: float = 0.3) -> Tensor:
            return scale * torch.randn(*shape, generator=generator)

        size = (hidden_size, hidden_size)
        self.blocks = [[(draw(*size), draw(hidden_size)) for _ in range(num_blocks)] for _ in range(num_heads)]
        self.outputs = [draw(vocab_size, hidden_size) for _ in range(num_heads)]

    def state(self, head: int, state: Tensor) -> Tensor:
        """Head `head`'s own state [H], by the definition: x + SiLU(W x + b) for each block."""
        for weight, bias in self.blocks[head]:
            state = state + functional.silu(weight @ state + bias)
        return state

    def logits(self, head: int, state: Tensor, target_head: Tensor, layout: str) -> Tensor:
        """Logits [V] of a head in this layout, in float32."""
        x = self.state(head, state)
        if layout in ("v2", "v2.pt", "lorax"):
            return target_head @ x
        if layout == "vllm-shared":
            return self.outputs[0] @ x
        if layout == "vllm-mapped":
            ids = token_map(len(self.outputs[0]))
            return torch.full((len(self.outputs[0]),), -torch.inf).index_put((ids,), self.outputs[head][: len(ids)] @ x)
        return self.outputs[head] @ x

    def tensors(self, layout: str) -> dict[str, Tensor]:
        """By the layout's names."""
        found: dict[str, Tensor] = {}
        is_vllm = layout.startswith("vllm")
        for i, head in enumerate(self.blocks):
            for j, (weight, bias) in enumerate(head):
                name = f"medusa_heads.blocks.{i}.layers.{j}" if is_vllm else f"{i}.{j}.linear"
                found |= {f"{name}.weight": weight, f"{name}.bias": bias}
            if layout in ("v1", "v1.pt"):
                found[f"{i}.{len(head)}.weight"] = self.outputs[i]
            if layout == "vllm":
                found[f"medusa_heads.lm_heads.{i}.weight"] = self.outputs[i]
            if layout == "vllm-mapped":
                ids = token_map(len(self.outputs[i]))
                found |= {f"lm_heads.{i}.weight": self.outputs[i][: len(ids)].clone(), "token_map": ids}
        if layout == "vllm-shared":
            found["lm_head.weight"] = self.outputs[0]
        return found

    def save(self, directory: Path, layout: str, base: str = "target") -> Path:
        """Write a directory in this layout; the config miscounts the heads, as published ones do."""
        directory.mkdir(parents=True)
        config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": len(self.blocks[0])}
        config |= {"base_model_name_or_path": f"some/{base}"} if base else {}
        config |= {"version": "2"} if layout in ("v2", "v2.pt") else {}
        if layout.startswith("vllm"):
            config = {"num_heads": 2, "num_hidden_layers": 1, "model_type": "medusa", "medusa_fc_bias": True}
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors(layout).items()}
        if layout.endswith(".pt"):
            torch.save(tensors, directory / "medusa_lm_head.pt")
        else:
            name = "model.safetensors" if layout.startswith("vllm") else "medusa_lm_head.safetensors"
            save_file(tensors, directory / name)
        return directory


def token_map(vocab_size: int) -> Tensor:
    """Ids that the rows of a truncated vocabulary stand for."""
    return torch.arange(0, vocab_size, 2).flip(0)
