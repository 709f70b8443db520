"""A dense checkpoint rounded and written as compressed-tensors: what others read of it, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights import quantize as module
from betoken.engine.weights.layers import GroupedLinear
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.quantize import main, quantize
from tests.engine.gguf_files import tiny_model, write_gguf
from tests.engine.tiny import save_tiny


def save(directory: Path) -> str:
    """A Llama whose layers are whole groups of 128, in bfloat16."""
    tiny_model().to(torch.bfloat16).save_pretrained(directory)
    return str(directory)


def layers_of(path: Any, **others: Any) -> dict[str, GroupedLinear]:
    config = EngineConfig(str(path), num_pages=8, compile="off", **others)
    loaded, _ = load_model(config, lambda stage, fraction: None)
    return {path: layer for path, layer in loaded.named_modules() if isinstance(layer, GroupedLinear)}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_transformers_and_the_engine_read_the_same_quantized_numbers(kind: Any, tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    told: list[float] = []
    assert quantize(source, target, kind, told.append) == 14
    assert told == sorted(told) and told[-1] == 1.0
    ours, at_load = layers_of(target), layers_of(source, quantize=kind)
    undone = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16, quantization_config=undone)
    stored = load_file(target / "model.safetensors")
    described = json.loads((target / "config.json").read_text())["quantization_config"]
    weights = QuantizationArgs(**described["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    package: Any = PackedQuantizationCompressor
    assert ours.keys() == at_load.keys() and len(ours) == 14
    for path, layer in ours.items():
        numbers = layer.grouped.dequantised()
        assert torch.equal(numbers, at_load[path].grouped.dequantised())
        parts = {name: stored[f"{path}.{name}"] for name in ("weight_packed", "weight_scale", "weight_shape")}
        parts["weight_scale"] = parts["weight_scale"].float()
        assert torch.equal(package.decompress(parts, scheme)["weight"], numbers)
        assert torch.equal(theirs.get_submodule(path).weight, numbers.bfloat16())


def test_many_quantized_tensors_are_written_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    monkeypatch.setattr(module, "FILE_BYTES", 1 << 18)
    quantize(source, target, "int4")
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    again = tmp_path / "whole"
    monkeypatch.undo()
    quantize(source, again, "int4")
    for path, layer in layers_of(target).items():
        assert torch.equal(layer.grouped.dequantised(), layers_of(again)[path].grouped.dequantised())


def test_layers_of_unsupported_widths_stay_dense(tmp_path: Path) -> None:
    source, target = save_tiny(tmp_path / "source", "qwen3"), tmp_path / "target"
    assert quantize(str(source), target, "int8") == 2
    assert layers_of(target).keys() == {f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)}
    with pytest.raises(ModelRefusedError, match="no linear layer of a multiple of 128 inputs"):
        quantize(save_tiny(tmp_path / "narrow", "llama"), tmp_path / "none", "int8")


def test_quantizing_a_quantized_checkpoint_or_into_an_existing_folder_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    quantize(source, target, "int8")
    for given, place, reason in (
        (str(target), tmp_path / "a", "is quantized already"),
        (source, target, "exists already"),
        (write_gguf(tmp_path / "tiny.gguf"), tmp_path / "b", "is a GGUF file"),
        (str(tmp_path / "nothing"), tmp_path / "c", "no such file or directory"),
    ):
        assert main([given, str(place), "--quantize", "int4"]) == 1
        assert reason in capsys.readouterr().err


def test_quantizing_a_model_that_transformers_cannot_load_is_rejected(tmp_path: Path) -> None:
    source = Path(save(tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    for fields, reason in (
        ({"model_type": "vit"}, "not a causal language model"),
        ({"model_type": "none"}, "none"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Model"}, "model_type": "own"}, "code of the checkpoint's own"),
    ):
        (source / "config.json").write_text(json.dumps(config | fields))
        with pytest.raises(ModelRefusedError, match=reason):
            quantize(str(source), tmp_path / "target", "int8")


def test_a_failed_quantization_leaves_no_files(tmp_path: Path) -> None:
    source, target = Path(save(tmp_path / "source")), tmp_path / "target"
    weights = load_file(source / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].fill_(torch.inf)}, source / "model.safetensors", {"format": "pt"})
    for _ in range(2):
        with pytest.raises(ModelRefusedError, match=f"{name} holds a value that is not finite"):
            quantize(str(source), target, "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_quantize_command_reports_its_result(tmp_path: Path) -> None:
    source, target = save(tmp_path / "source"), tmp_path / "target"
    command = [sys.executable, "-m", "betoken.cli", "quantize", source, str(target), "--quantize", "int4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}: 14 layers rounded to int4\n" and "100%" in done.stderr
