"""Checkpoints whose MTP tensors are missing, misshapen or of another kind are refused by the tensor's name."""

import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.host.making import resolve_built_in
from betoken.drafters.mtp import SPEC
from betoken.drafters.mtp.checkpoint import check_layer, find_layers, load_layer
from betoken.drafters.mtp.hosting import make_drafter, memory_of
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.verify_worker.built_in import with_built_in
from betoken.verify_worker.engine_config import engine_config
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.drafters.mtp.tiny import CONFIGS, save_target
from tests.engine.quantized_files import awq_config, float4_config, store_awq, store_float4, write_quantized
from tests.engine.tiny import save_tiny

FAULTS = [
    ("qwen3_5", {"without": ["mtp.fc.weight"]}, r"mtp\.fc\.weight and 0 more MTP tensors are missing"),
    ("qwen3_5", {"more": {"mtp.norm.weight": torch.zeros(31)}}, r"mtp\.norm\.weight: \[31\]: must be \[32\]"),
    ("qwen3_5", {"more": {"mtp.fc.weight_scale": torch.ones(1)}}, r"mtp\.fc\.weight_scale and 0 more are tensors that"),
    (
        "qwen3_5",
        {"more": {"mtp.fc.weight": torch.zeros(32, 64, dtype=torch.float8_e4m3fn)}},
        r"mtp\.fc\.weight: F8_E4M3: must be one of F32, F16, BF16",
    ),
    ("deepseek_v3", {"without": ["model.layers.2.hnorm.weight"]}, r"model\.layers\.2\.hnorm\.weight and 0 more"),
    (
        "deepseek_v3",
        {"without": ["model.layers.2.mlp.experts.3.up_proj.weight"]},
        r"model\.layers\.2\.mlp\.experts\.gate_up_proj",
    ),
    ("glm4_moe", {"without": ["model.layers.2.shared_head.norm.weight"]}, r"layers\.2\.shared_head\.norm\.weight"),
]


def settings_of(path, names="mtp"):
    return VerifyWorkerSettings(model=str(path), dtype="float32", attached_drafters=names, num_pages=64)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_tiny(tmp_path_factory.mktemp("target"), "llama")
    return load_runner(EngineConfig(model=path, dtype="float32", num_pages=64, compile="off", self_check=False))


@pytest.mark.parametrize(("name", "fault", "text"), FAULTS)
def test_a_faulty_mtp_tensor_stops_the_start_by_its_name(tmp_path, target, caplog, name, fault, text):
    settings = settings_of(save_target(tmp_path, name, **fault))
    with pytest.raises(FailedPreconditionError, match=rf"^--attached-drafters = mtp: .*{text}[^\n]*$"):
        make_drafter(SimpleNamespace(settings=settings, target=target))
    with caplog.at_level(logging.WARNING):
        assert resolve_built_in(settings_of(tmp_path, "builtin,ngram")) == ("ngram",)
    assert "the drafter mtp is not attached" in caplog.text


def test_a_checkpoint_without_mtp_layers_is_refused_by_the_drafters_name(tmp_path):
    settings = settings_of(save_tiny(tmp_path, "llama"))
    with pytest.raises(FailedPreconditionError, match="model_type: 'llama': must be one of qwen3_next"):
        memory_of(settings)
    assert resolve_built_in(settings_of(settings.model, "builtin")) == ()


def test_a_checkpoint_whose_mtp_layer_was_removed_is_served_without_the_drafter(tmp_path, caplog):
    AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"]()).save_pretrained(tmp_path)
    assert resolve_built_in(settings_of(tmp_path, "builtin")) == () and not caplog.records
    with pytest.raises(FailedPreconditionError, match=r"it holds no MTP tensors, model\.layers\.2\.\*"):
        memory_of(settings_of(tmp_path))


def test_all_layers_of_a_checkpoint_are_read_where_each_has_its_own_depth(tmp_path):
    found = find_layers(str(save_target(tmp_path / "own", "deepseek_v3", num_layers=2)), None)
    assert [layer.index for layer in found] == [0, 1]
    assert found[1].stored_name("layers.0.enorm.weight") == "model.layers.3.enorm.weight"
    one, two = (
        memory_of(settings_of(save_target(tmp_path / "one", "deepseek_v3"))),
        memory_of(settings_of(tmp_path / "own")),
    )
    assert two.page_bytes == 2 * one.page_bytes and two.weight_bytes > one.weight_bytes
    shared = save_target(tmp_path / "shared", "qwen3_5", more={"mtp.layers.1.eh_proj.weight": torch.ones(1)})
    assert len(find_layers(str(shared), None)) == 1


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("qwen3_5", "mtp_dspark.layers.0.fc.weight", r"DSpark tensors are read from a separate directory \(--dflash\)"),
        (
            "llama",
            "model.mtp_layers.0.input_proj.weight",
            r"model_type 'llama' of MTP tensors: must be one of qwen3_next",
        ),
    ],
)
def test_drafting_layers_in_another_layout_are_refused_by_the_tensors_name(tmp_path, caplog, name, tensor, text):
    folder = save_target(tmp_path, name) if name in CONFIGS else Path(save_tiny(tmp_path, name))
    path = folder / "model.safetensors"
    save_file(load_file(path) | {tensor: torch.ones(2)}, path, {"format": "pt"})
    with pytest.raises(FailedPreconditionError, match=rf"^--attached-drafters = mtp: .*{re.escape(tensor)}: {text}"):
        memory_of(settings_of(folder))
    assert resolve_built_in(settings_of(folder, "builtin")) == () and tensor in caplog.text


def test_built_in_drafters_are_the_checkpoints_and_none_is_no_name(tmp_path):
    path = save_target(tmp_path, "qwen3_5")
    assert resolve_built_in(settings_of(path, "ngram,builtin")) == ("ngram", "mtp")
    assert resolve_built_in(settings_of(path, "mtp,builtin")) == ("mtp",)
    assert settings_of(path, "none").attached_drafters == ()
    assert memory_of(settings_of(path)).page_bytes == 16 * 2 * 2 * 8 * 4


def test_an_fp8_mtp_layer_is_dequantised_when_it_is_read(tmp_path):
    """By block, as DeepSeek-V3 is published; experts too."""
    path = save_target(tmp_path, "deepseek_v3")
    plain = load_layer(find_layers(str(path), None)[0], torch.float32).state_dict()
    stored = load_file(path / "model.safetensors")
    for name in [name for name in stored if name.startswith("model.layers.2.") and "_proj" in name]:
        stored[name + "_scale_inv"] = torch.tensor([[0.25]])
        stored[name] = (stored[name] * 4).to(torch.float8_e4m3fn)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (path / "config.json").write_text(json.dumps(config))
    read = load_layer(find_layers(str(path), None)[0], torch.float32).state_dict()
    for name, tensor in plain.items():
        if name.startswith("layers."):
            expected = (tensor * 4).to(torch.float8_e4m3fn).float() / 4 if "_proj" in name else tensor
            assert torch.equal(read[name], expected), name


@pytest.mark.parametrize(
    ("name", "config", "store"),
    [("qwen3_5", awq_config(16), store_awq(16)), ("deepseek_v3", float4_config(False), store_float4(False))],
)
def test_a_quantised_mtp_layer_is_dequantised_when_it_is_read(tmp_path, name, config, store):
    """With 4 bits; of DeepSeek experts and `eh_proj`, too."""
    path = save_target(tmp_path, name)
    numbers = write_quantized(path, config, store)
    found = find_layers(str(path), None)[0]
    check_layer(found)
    read, num_checked = load_layer(found, torch.float32).state_dict(), 0
    for stored, expected in numbers.items():
        own = found.layout.own_name(f"{stored}.weight", found.config.num_hidden_layers) or ""
        if "experts.1.down_proj" in own:
            own, expected = own.replace("experts.1.down_proj.weight", "experts.down_proj"), expected.expand(4, -1, -1)
            read[own] = read[own][1].expand(4, -1, -1)
        if own in read:
            torch.testing.assert_close(read[own], expected, atol=1e-3, rtol=1e-2, msg=own)
            num_checked += 1
    assert num_checked >= 5


def test_without_mtp_layers_in_transformers_nothing_is_built_in(monkeypatch):
    """As in versions before 5.23: a worker that does not name the drafter starts."""
    monkeypatch.setitem(sys.modules, "betoken.drafters.mtp.hosting", None)
    settings = VerifyWorkerSettings(model="m")
    assert resolve_built_in(settings) == ()
    with pytest.raises(FailedPreconditionError, match="--attached-drafters = mtp: needs MTP layers of transformers"):
        SPEC.make(SimpleNamespace(settings=settings))


def test_pipeline_stages_share_embeddings_with_a_built_in_drafter(tmp_path):
    settings = VerifyWorkerSettings(model=str(save_target(tmp_path, "qwen3_5")), pipeline=2)
    assert not engine_config(settings.model_copy(update={"attached_drafters": ()})).shares_embedding
    staged = with_built_in(settings, lambda stage, fraction: None)
    assert staged.attached_drafters == ("mtp",) and engine_config(staged).shares_embedding
