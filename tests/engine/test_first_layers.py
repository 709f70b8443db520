"""A model cut to its first layers is exactly that: their weights, the model's own norm and head, nothing else."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.loading import load_model
from tests.engine.tiny import CONFIGS, HYBRIDS, save_tiny

IDS = [3, 1, 4, 1, 5, 9]


HELD = ("jamba", "minimax")
"""Hybrids of the default run: one with a periodic pattern of layers, one that lists them."""
WIDER = [name for name in HYBRIDS if name not in (*HELD, "zamba")]  # of which transformers loads no lone hybrid layer


@pytest.mark.parametrize(
    "family",
    [*CONFIGS, *HELD, *(pytest.param(name, marks=pytest.mark.slow) for name in WIDER)],
)
def test_a_one_layer_model_gives_the_output_of_the_models_first_layer(tmp_path, family):
    directory = save_tiny(tmp_path, family)
    config = EngineConfig(directory, dtype="float32", num_layers=1, num_pages=8, compile="off")
    runner = load_runner(config)
    page_ids, _ = runner.page_table.allocate(IDS)
    logits = runner.forward([Segment(page_ids, 0, IDS, len(IDS))]).logits
    whole = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    decoder = whole.get_decoder()
    layers = decoder.h if hasattr(decoder, "h") else decoder.layers
    del layers[1:]
    whole.config.num_hidden_layers = 1
    with torch.no_grad():
        expected = whole(torch.tensor([IDS]), use_cache=False).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_only_weights_of_the_first_layers_are_loaded_and_fingerprinted(tmp_path, caplog):
    directory = save_tiny(tmp_path, "llama")
    models = [load_model(EngineConfig(directory, num_layers=n), lambda stage, part: None) for n in (None, 2, 1)]
    (whole, all_info), (_, both_info), (cut, cut_info) = models
    names = {name for name, _ in whole.named_parameters()}
    assert {name for name, _ in cut.named_parameters()} == {name for name in names if ".layers.1." not in name}
    assert both_info.num_parameters == all_info.num_parameters > cut_info.num_parameters
    assert len({info.weights_fingerprint for _, info in models}) == 3
    assert "UNEXPECTED" not in caplog.text


def test_more_layers_than_the_model_has_are_rejected(tmp_path):
    with pytest.raises(ModelRefusedError, match="num_layers: 3 is above the model's 2"):
        load_model(EngineConfig(save_tiny(tmp_path, "llama"), num_layers=3), lambda stage, part: None)
    with pytest.raises(ValueError, match="num_layers: 0"):
        EngineConfig("x", num_layers=0)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("hidden_size_per_layer_input = 16", {}),
        ("num_kv_shared_layers = 1", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1}),
    ],
)
def test_first_layers_of_a_model_whose_layers_share_tensors_are_refused_before_the_load(tmp_path, field, changes):
    directory = Path(save_tiny(tmp_path, "gemma4_text"))
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    stages = []
    with pytest.raises(ModelRefusedError, match=f"num_layers: 1 of 2 layers do not work alone, {field}: "):
        load_model(EngineConfig(str(directory), num_layers=1), lambda stage, part: stages.append(stage))
    assert "loading weights" not in stages
