"""Medusa heads: residual blocks on the target's last hidden state, and a head each or the target's own.

Head i predicts the token i + 2 places after the one whose hidden state it reads. Parameter names follow
FasterDecoding's files, and a fresh head says what the target's own head says. It knows no data.

Source: Cai et al., arXiv:2401.10774.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import nn

WEIGHTS_FILE = "medusa_lm_head.safetensors"


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W and b begin at zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        return x + F.silu(self.linear(x))


class TrainableHeads(nn.ModuleList):
    """`num_heads` chains of blocks; in version 1 each ends with its own output layer [V, H]."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, head: torch.Tensor | None) -> None:
        """`head`: the target's output weight [V, H], with which every head begins; None for version 2: it is shared."""
        heads = []
        for _ in range(num_heads):
            blocks: list[nn.Module] = [ResidualBlock(hidden_size) for _ in range(num_layers)]
            if head is not None:
                output = nn.Linear(hidden_size, head.shape[0], bias=False)
                with torch.no_grad():
                    output.weight.copy_(head)
                blocks.append(output)
            heads.append(nn.Sequential(*blocks))
        super().__init__(heads)
        self.num_layers = num_layers
        self.is_sharing = head is None

    def forward(self, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Head `index` on hidden states [..., H]: logits [..., V], or in version 2 what the target's head takes."""
        result: torch.Tensor = self[index](hidden)
        return result


def save_heads(heads: TrainableHeads, folder: Path, base_model: str) -> None:
    """Write config.json and bfloat16 safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "medusa",
        "base_model_name_or_path": base_model,
        "medusa_num_heads": len(heads),
        "medusa_num_layers": heads.num_layers,
        "hidden_size": next(heads.parameters()).shape[0],
        "version": "2" if heads.is_sharing else "1",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in heads.state_dict().items()}
    (folder / WEIGHTS_FILE).write_bytes(save(tensors, {"format": "pt"}))


def load_heads(folder: Path) -> TrainableHeads:
    """Heads as `save_heads` wrote them, in float32; the file determines their number."""
    tensors = load_file(folder / WEIGHTS_FILE)
    num_heads = 1 + max(int(name.partition(".")[0]) for name in tensors)
    num_layers = 1 + max(int(name.split(".")[1]) for name in tensors if ".linear." in name)
    head = tensors.get(f"0.{num_layers}.weight")
    heads = TrainableHeads(num_heads, num_layers, tensors["0.0.linear.weight"].shape[0], head)
    heads.load_state_dict(tensors)
    return heads
