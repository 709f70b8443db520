"""The text of multimodal checkpoints: random drafts, trees, chunks and too few pages give `generate()`'s tokens."""

import json

import pytest
from safetensors.torch import load_file, save_file

from betoken.engine.config import EngineConfig
from betoken.engine.families import SERVED_MULTIMODAL
from betoken.engine.weights.loading import load_model
from tests.engine.multimodal_files import class_of, save_multimodal
from tests.engine.tiny_multimodal import CONFIGS, IMAGE_ID
from tests.verify_worker.as_generate import assert_speculation_gives_the_tokens_of_generate

_USUAL = ("mistral3", "qwen2_5_vl", "gemma3")
"""Families of the default run: a layout each, and one of windows."""


@pytest.mark.parametrize(
    "family", [family if family in _USUAL else pytest.param(family, marks=pytest.mark.slow) for family in CONFIGS]
)
def test_any_speculation_with_a_multimodal_target_gives_the_tokens_of_generate(tmp_path, family: str) -> None:
    directory = save_multimodal(tmp_path, family)
    model = class_of(family).from_pretrained(directory, dtype="float32").eval()
    runner = assert_speculation_gives_the_tokens_of_generate(directory, model, IMAGE_ID)
    assert IMAGE_ID in runner.info.media_token_ids


def test_every_supported_multimodal_type_is_tested() -> None:
    assert {make().model_type for make in CONFIGS.values()} == SERVED_MULTIMODAL


def _load(directory: str):
    return load_model(EngineConfig(directory), lambda stage, fraction: None)


def test_no_vision_tower_is_created_or_loaded(tmp_path) -> None:
    directory = save_multimodal(tmp_path, "mistral3")
    weights = load_file(tmp_path / "model.safetensors")
    towers = [name for name in weights if not name.startswith("language_model.")]
    assert any(name.startswith("vision_tower.") for name in towers)
    model, info = _load(directory)
    assert sum(weights[name].numel() for name in weights if name not in towers) == info.num_parameters
    for name in towers:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _load(directory)


@pytest.mark.parametrize("family", ["mistral3", "qwen2_vl"])
def test_each_published_layout_of_multimodal_files_is_loaded(family: str, tmp_path) -> None:
    """transformers renamed them: `language_model.model` and `model.language_model`, and Qwen2-VL's flat files."""
    directory = save_multimodal(tmp_path, family)
    expected, info = _load(directory)
    weights = load_file(tmp_path / "model.safetensors")
    own = {
        name.replace("language_model.model.", "model.").replace("model.language_model.", "model."): tensor
        for name, tensor in weights.items()
    }
    own = {name.replace("language_model.lm_head.", "lm_head."): tensor for name, tensor in own.items()}
    towers = {name for name in own if not name.startswith(("model.", "lm_head."))} | {
        name for name in own if name.startswith("model.visual.")
    }
    text = {name: tensor for name, tensor in own.items() if name not in towers}
    layouts = [
        {f"language_model.{name}": tensor for name, tensor in text.items()},
        {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in text.items()},
        {**text, **{f"visual.{name.rpartition('visual.')[2]}": own[name] for name in towers}},
    ]
    for layout in layouts:
        save_file(layout, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model, _ = _load(directory)
        assert all(
            (ours == theirs).all() for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True)
        )


def test_a_multimodal_configuration_without_a_text_part_is_read(tmp_path) -> None:
    """As Qwen2-VL's were published."""
    directory = save_multimodal(tmp_path, "qwen2_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("model_type")
    rope = text.pop("rope_parameters")
    flat = text | config | {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", **rope}}
    flat["rope_scaling"].pop("rope_type")
    expected, _ = _load(directory)
    (tmp_path / "config.json").write_text(json.dumps(flat))
    model, info = _load(directory)
    assert info.media_token_ids == (IMAGE_ID,)
    assert model.config.rope_parameters["mrope_section"] == expected.config.rope_parameters["mrope_section"]
    assert all((ours == theirs).all() for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True))
