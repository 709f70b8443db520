"""Rotary frequencies that transformers chooses by the longest text of a batch: here they are settled at load."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from tests.engine.tiny import save_tiny

_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * index for index in range(8)],
    "long_factor": [2.0 + 0.3 * index for index in range(8)],
    "original_max_position_embeddings": 64,
}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.7}
_IDS = [(7 * position + 3) % 101 for position in range(96)]


def save(directory: Path, rope: dict[str, Any], family: str = "llama") -> str:
    saved = save_tiny(directory, family)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rope}))
    return saved


def load(directory: str, **settings: Any) -> ModelRunner:
    return load_runner(EngineConfig(directory, dtype="float32", num_pages=64, **({"compile": "off"} | settings)))


def is_own(runner: ModelRunner, directory: str, ids: list[int]) -> bool:
    """Whether logits equal transformers' for this text alone; ours come in chunks."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager").eval()
    theirs = model(torch.tensor([ids])).logits[0].detach()
    ours = forward_in_chunks(runner, ids, 7)
    return torch.allclose(ours, theirs, rtol=0, atol=theirs.abs().mean().item() * 1e-3)


@pytest.mark.parametrize("family", ["llama", "phimoe"])
def test_longrope_takes_the_factors_of_the_requested_context(tmp_path: Path, family: str) -> None:
    """PhiMoE has separate scales for short and long texts, in addition to the factors."""
    sizes = {"short_mscale": 1.1, "long_mscale": 1.3} if family == "phimoe" else {}
    directory = save(tmp_path, _LONGROPE | sizes, family)
    with pytest.raises(ModelRefusedError, match=r"set max_context, to 64 or less .* or to more"):
        load(directory)
    short, long = load(directory, max_context=64), load(directory, max_context=640)
    assert is_own(short, directory, _IDS[:64]) and is_own(long, directory, _IDS)
    assert not is_own(long, directory, _IDS[:64]), "a text that ends within the original length differs, as documented"
    assert torch.equal(forward_in_chunks(long, _IDS, 96)[:40], forward_in_chunks(long, _IDS[:40], 1))


@pytest.mark.slow
def test_constant_rotary_frequencies_can_be_compiled(tmp_path: Path) -> None:
    for index, (rope, asked) in enumerate([(_LONGROPE, 640), (_LONGROPE, 64), (_DYNAMIC, None)]):
        directory = save(tmp_path / str(index), rope)
        assert load(directory, max_context=asked, compile="on").is_compiled


def test_dynamic_ntk_changes_nothing_within_the_models_own_length(tmp_path: Path) -> None:
    directory = save(tmp_path, _DYNAMIC)
    assert is_own(load(directory), directory, _IDS)
    with pytest.raises(ModelRefusedError, match="max_context: 641 is above"):
        load(directory, max_context=641)
