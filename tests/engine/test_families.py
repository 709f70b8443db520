"""Records of model families: each type has one record, and every class and function a record names is transformers'."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from betoken.engine.config import EngineConfig
from betoken.engine.families import ARCHITECTURES, FAMILIES, family_of
from betoken.engine.weights.language_model import draft_tensors
from betoken.engine.weights.loading import load_model
from tests.engine.tiny import save_tiny

TYPES = [name for family in FAMILIES for name in family.model_types]
MULTIMODAL = [name for family in FAMILIES for name in family.multimodal]


def _code_of(model_type: str) -> Any:
    """The modeling file of a model type."""
    configuration = CONFIG_MAPPING[model_type].__module__
    return importlib.import_module(configuration.replace("configuration_", "modeling_"))


def test_every_model_type_has_one_family():
    assert len(TYPES) == len(set(TYPES))
    assert len(MULTIMODAL) == len(set(MULTIMODAL))


def test_every_gguf_architecture_has_one_family():
    assert len(ARCHITECTURES) == sum(len(family.gguf) for family in FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: (family.model_types + family.multimodal)[0])
def test_the_code_that_a_family_names_is_of_its_models(family):
    files = [_code_of(name) for name in family.model_types if name in CONFIG_MAPPING]
    for name in (*family.mixers, *family.bindings, *family.unnumbered, *family.recurrences):
        assert any(hasattr(file, name) for file in files), name


def test_a_model_type_without_a_record_needs_nothing():
    plain = family_of("gpt_neox")
    assert not plain.bindings and not plain.layer_types and not plain.refusal


def test_draft_tensors_of_a_family_are_those_it_names():
    tensors = dict.fromkeys(("mtp.fc.weight", "model.layers.0.mtp.weight", "lm_head.weight"), 1)
    assert list(draft_tensors(tensors, "qwen3_next")) == ["mtp.fc.weight"]
    assert draft_tensors(tensors, "llama") == {}


def test_draft_tensors_of_a_checkpoint_are_logged_and_not_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    directory = save_tiny(tmp_path, "qwen3_next")
    weights = load_file(tmp_path / "model.safetensors")
    weights["mtp.fc.weight"] = weights["lm_head.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        model, _ = load_model(EngineConfig(directory), lambda stage, fraction: None)
    assert "1 tensors of MTP layers, which the model itself does not use" in caplog.text
    assert not any("mtp" in name for name in model.state_dict())
