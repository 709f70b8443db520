"""Tiny GGUF files with an MTP layer, as llama.cpp's converter writes it, next to the same checkpoint in safetensors."""

import re
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafters.mtp.tiny import QWEN, add_layer
from tests.engine.gguf_families import FAMILIES, family_model, write_family

_EXPERT = re.compile(r"mtp\.layers\.0\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")
_NEXTN = {"fc": "eh_proj", "e": "enorm", "h": "hnorm", "norm": "shared_head_norm"}


def write_both(folder: Path, architecture: str, type_name: str = "F32", **more: Any) -> tuple[str, str]:
    """The GGUF file and the directory. Matrices of the MTP layer have the type; `more` are further tensors."""
    model = family_model(architecture)
    model.save_pretrained(folder / "whole")
    add_layer(folder / "whole")
    count = model.config.num_hidden_layers
    stored = load_file(folder / "whole" / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name in sorted(name for name in stored if name.startswith("mtp.")):
        if (match := _EXPERT.fullmatch(name)) is not None:
            experts.setdefault(f"blk.{count}.ffn_{match[1]}_exps.weight", []).append(stored[name])
        else:
            tensors[_name_of(architecture, name, count)] = stored[name]
    tensors |= {name: torch.stack(parts) for name, parts in experts.items()}
    given = {}
    for name, numbers in tensors.items():
        numbers = FAMILIES[architecture].moved(model.config, name, numbers).contiguous()
        is_plain = numbers.dim() < 2 or "ffn_gate_inp" in name
        given[name] = (numbers.numpy(), "F32" if is_plain else type_name)
    path = folder / "target" / "tiny.gguf"
    path.parent.mkdir()
    changes = {"block_count": count + 1, "nextn_predict_layers": 1}
    return write_family(path, architecture, model, True, changes, **given | more), str(folder / "whole")


def _name_of(architecture: str, name: str, count: int) -> str:
    """A tensor's name in the file."""
    for key, own in _NEXTN.items():
        if name == f"{QWEN[key]}.weight":
            return f"blk.{count}.nextn.{own}.weight"
    rest = name.removeprefix("mtp.layers.0.").removesuffix(".weight")
    number = next(key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    stem = gguf.get_tensor_name_map(number, count + 1).get_name(f"model.layers.{count}.{rest}")
    return f"{stem}.weight"
