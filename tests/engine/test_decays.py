"""Decays of lightning attention, which transformers stores as weights: rounded to the checkpoint's type, or absent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from betoken.engine.config import EngineConfig
from betoken.engine.mixers.lightning import decay_names
from betoken.engine.weights.loading import load_model
from tests.engine.tiny import save_tiny


def _decays(directory: str, dtype: str = "float32") -> dict[str, Tensor]:
    model, _ = load_model(EngineConfig(directory, dtype=dtype), lambda stage, fraction: None)
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in decay_names(model)}


def _change(directory: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Put `change` of each stored decay in its place; none for None."""
    path = Path(directory) / "model.safetensors"
    weights = load_file(path)
    for name in [name for name in weights if name.endswith(("_decay", ".slope_rate"))]:
        changed = change(weights.pop(name))
        if changed is not None:
            weights[name] = changed
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, None])
def test_decays_follow_the_models_sizes(tmp_path: Path, stored: torch.dtype | None) -> None:
    directory = save_tiny(tmp_path, "minimax")
    exact = _decays(directory)
    _change(directory, lambda decay: None if stored is None else decay.to(stored))
    found = _decays(directory)
    assert len(found) == 4 and all(torch.equal(found[name], exact[name]) for name in exact)
    assert all(torch.equal(decay, exact[name].bfloat16()) for name, decay in _decays(directory, "bfloat16").items())


def test_decays_stored_in_a_checkpoint_are_kept(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "minimax")
    exact = _decays(directory)
    _change(directory, lambda decay: decay * 0.75)
    assert all(torch.equal(decay, exact[name] * 0.75) for name, decay in _decays(directory).items())
