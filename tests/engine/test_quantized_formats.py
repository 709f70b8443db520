"""Quantised checkpoints of every format: their numbers to the last bit, their tokens, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from betoken.bench.near_tie import is_near_tie
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import GroupedLinear, grouped_bytes
from betoken.engine.weights.loading import load_model
from tests.engine import quantized_files as files
from tests.engine.tiny import save_tiny
from tests.products import slow

PROMPTS = [[1, 2, 3, 4, 5], list(range(30, 70))]
NUM_NEW = 16
LAYER = "model.layers.1.mlp.down_proj"


def of_package(form: str, dtype: torch.dtype = torch.bfloat16, **weights: Any) -> tuple[dict[str, Any], Any]:
    return files.compressed_tensors_config(form, **weights), files.store_compressed_tensors(form, weights, dtype)


def integers(bits: int, strategy: str, symmetric: bool = True, **others: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric} | others


FORMATS = {
    f"packed-{bits}-{strategy}-{'symmetric' if symmetric else 'asymmetric'}": of_package(
        "pack-quantized", **integers(bits, strategy, symmetric, **({"group_size": 32} if strategy == "group" else {}))
    )
    for bits in (4, 8)
    for strategy in ("group", "channel")
    for symmetric in (True, False)
}
FORMATS |= {
    "packed-float-scales": of_package("pack-quantized", torch.float32, **integers(4, "group", group_size=16)),
    "packed-actorder-weight": of_package("pack-quantized", **integers(4, "group", group_size=32, actorder="weight")),
    "integers-channel": of_package("int-quantized", **integers(8, "channel")),
    "integers-tensor-asymmetric": of_package("int-quantized", **integers(8, "tensor", symmetric=False)),
    "float-tensor": of_package("float-quantized", num_bits=8, type="float", strategy="tensor"),
    "float-channel": of_package("float-quantized", num_bits=8, type="float", strategy="channel"),
    "float-block": of_package("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[64, 32]),
    "gptq-4": (files.gptq_config(4, 32), files.store_gptq(4, 32, less=1)),
    "gptq-4-symmetric": (files.gptq_config(4, 32), files.store_gptq(4, 32, less=1, is_symmetric=True)),
    "gptq-8": (files.gptq_config(8, 32, checkpoint_format="gptq"), files.store_gptq(8, 32, less=1)),
    "gptq-whole": (files.gptq_config(4, -1, desc_act=True), files.store_gptq(4, -1, less=1)),
    "gptq-2-4": (files.gptq_config(4, 32, checkpoint_format="gptq_v2"), files.store_gptq(4, 32, less=0)),
    "gptq-2-8": (files.gptq_config(8, 32, checkpoint_format="gptq_v2"), files.store_gptq(8, 32, less=0)),
    "gptq-2-2": (files.gptq_config(2, 32, checkpoint_format="gptq_v2"), files.store_gptq(2, 32, less=0)),
    **{
        f"gptq-{bits}-ordered": (
            files.gptq_config(bits, 32, desc_act=True),
            files.store_gptq(bits, 32, less=1, is_ordered=True),
        )
        for bits in (2, 4, 8)
    },
    "packed-actorder-group": (
        files.compressed_tensors_config(
            "pack-quantized", **integers(4, "group", False, group_size=32, actorder="group")
        ),
        files.store_ordered(32),
    ),
    "bnb-nf4": (files.bitsandbytes_config("nf4"), files.store_bitsandbytes("nf4")),
    "bnb-nf4-nested": (files.bitsandbytes_config("nf4", True), files.store_bitsandbytes("nf4", True)),
    "bnb-fp4": (files.bitsandbytes_config("fp4"), files.store_bitsandbytes("fp4")),
    "bnb-int8": (files.bitsandbytes_config("int8"), files.store_bitsandbytes("int8")),
    "awq": (files.awq_config(32), files.store_awq(32)),
    "nvfp4": (files.float4_config(is_mx=False), files.store_float4(is_mx=False)),
    "mxfp4": (files.float4_config(is_mx=True), files.store_float4(is_mx=True)),
    "modelopt-nvfp4": (files.modelopt_config("NVFP4"), files.store_modelopt("NVFP4")),
    "modelopt-fp8": (files.modelopt_config("FP8"), files.store_modelopt("FP8")),
    "fp8-block": (files.fp8_config((64, 64)), files.store_fp8((64, 64))),
    "fp8-tensor": (files.fp8_config(None), files.store_fp8(None)),
}


def config_of(directory: Path, dtype: Any = "float32") -> EngineConfig:
    return EngineConfig(str(directory), dtype=dtype, num_pages=32, compile="off", self_check=False)


def write(directory: Path, name: str) -> dict[str, torch.Tensor]:
    save_tiny(directory, "llama")
    return files.write_quantized(directory, *FORMATS[name])


def gap_of(logits: torch.Tensor) -> float:
    best = logits.topk(2).values
    return float(best[0] - best[1])


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantized_weight_has_the_numbers_of_its_format_to_the_last_bit(name: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, name)
    loaded, info = load_model(config_of(tmp_path, "bfloat16"), lambda stage, fraction: None)
    layers = {path: layer for path, layer in loaded.named_modules() if isinstance(layer, GroupedLinear)}
    assert layers.keys() == numbers.keys() and len(numbers) == 14
    for path, layer in layers.items():
        assert torch.equal(layer.grouped.dequantised(), numbers[path]), path
    assert info.num_parameters == sum(weight.numel() for weight in save_and_load(tmp_path / "plain").values())


def save_and_load(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(Path(save_tiny(directory, "llama")) / "model.safetensors")


@pytest.mark.parametrize("name", [*[*FORMATS][::2], *slow(*[*FORMATS][1::2])])  # their numbers are tested above
def test_tokens_of_a_quantized_checkpoint_equal_the_dequantized_models(name: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, name)
    plain = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "plain", "llama"), dtype=torch.float32).eval()
    for path, weight in numbers.items():
        plain.get_submodule(path).weight.data = weight
    runner = load_runner(config_of(tmp_path))
    for prompt in PROMPTS:
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None}
        expected = plain.generate(torch.tensor([prompt]), **options)[0].tolist()
        ours, theirs = forward_together(runner, [expected])[0], plain(torch.tensor([expected])).logits[0]
        for place in range(len(prompt) - 1, len(expected) - 1):
            if ours[place].argmax() != expected[place + 1]:
                assert is_near_tie(gap_of(ours[place]), gap_of(theirs[place])), (place, name)
                break


STRADDLING = [name for name in FORMATS if "4" in name and name.startswith("bnb")]
"""Their blocks of 64 go on from one output to the next where layers have 96 inputs: each half has a scale then."""


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - {"packed-float-scales", *STRADDLING}))
def test_quantized_weights_take_little_more_than_the_file(name: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, name)
    stored = load_file(tmp_path / "model.safetensors")
    in_file = sum(weight.nbytes for key, weight in stored.items() if key.rpartition(".")[0] in numbers)
    loaded, _ = load_model(config_of(tmp_path), lambda stage, fraction: None)
    more = 1.34 if "nvfp4" in name else 1.1  # the scales of NVFP4 become float32
    assert grouped_bytes(loaded) <= more * in_file


PACKED, GPTQ, FP8 = "packed-4-group-asymmetric", "gptq-4", "fp8-block"
NVFP4, MODELOPT = "nvfp4", "modelopt-nvfp4"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        (PACKED, {"format": "marlin-24"}, r"compressed-tensors: format = 'marlin-24' is none of 'dense'"),
        (PACKED, {"transform_config": {"a": 1}}, r"compressed-tensors: transform_config is not empty"),
        (PACKED, {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config.format = 'sparse-24-bitmask'"),
        (PACKED, {"config_groups": {}}, r"compressed-tensors: config_groups = \{\} names no group"),
        (GPTQ, {"bits": 3}, r"gptq: bits = 3 is none of 2, 4, 8"),
        (GPTQ, {"checkpoint_format": "marlin"}, r"gptq: checkpoint_format = 'marlin' is none of 'gptq', 'gptq_v2'"),
        (GPTQ, {"group_size": 24}, r"gptq: group_size = 24 is neither -1, 16 nor a multiple of 32"),
        (GPTQ, {"group_size": "128"}, r"gptq: group_size = '128' is neither"),
        (GPTQ, {"bits": 8}, r"gptq: .*down_proj.qweight: \[12, 64\] of I32, not \[24, 64\] of int32"),
        ("awq", {"version": "gemv"}, r"awq: version = 'gemv' is not 'gemm'"),
        ("awq", {"bits": 8}, r"awq: bits = 8 is not 4"),
        ("awq", {"group_size": 64}, r"awq: .*qzeros: \[3, 8\] of I32, not \[2, 8\] of int32"),
        (FP8, {"fmt": "e5m2"}, r"fp8: fmt = 'e5m2' is not 'e4m3'"),
        (FP8, {"weight_block_size": [128]}, r"fp8: weight_block_size = \[128\] is not a pair"),
        (FP8, {"weight_block_size": [64, 24]}, r"fp8: the blocks' width = 24 is neither"),
        (FP8, {"weight_block_size": [32, 64]}, r"fp8: .*weight_scale_inv: \[1, 2\] of F32, not .*\[2, 2\]"),
        (
            FP8,
            {"quant_method": "quark"},
            r"quantized by 'quark', not by awq, bitsandbytes, compressed-tensors, fp8, gptq, modelopt, mxfp4",
        ),
        (NVFP4, {"format": "mxfp8-quantized"}, r"compressed-tensors: format = 'mxfp8-quantized' is none of 'dense'"),
        (MODELOPT, {"quant_algo": "NVFP4_AWQ"}, r"modelopt: quant_algo = 'NVFP4_AWQ' is none of FP8, NVFP4"),
    ],
)
def test_an_unsupported_quantization_setting_is_rejected_by_name(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write(tmp_path, name)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    described["quantization_config"] |= changes
    path.write_text(json.dumps(described))
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(config_of(tmp_path), lambda stage, fraction: None)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("num_bits", 3, r"group_0.weights.num_bits = 3 is none of 4, 8"),
        ("type", "float", r"group_0.weights.num_bits = 4 is none of 8"),
        ("strategy", "tensor_group", r"group_0.weights.strategy = 'tensor_group' is none of"),
        ("actorder", "column", r"group_0.weights.actorder = 'column' is none of"),
        ("group_size", 64, r"weight_scale: \[64, 3\] of BF16, not \[64, 2\] of"),
        ("num_bits", 8, r"weight_packed: no group has 4 bits"),
    ],
)
def test_an_unsupported_quantization_group_is_rejected_by_name(
    field: str, value: Any, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, PACKED)
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    described["quantization_config"]["config_groups"]["group_0"]["weights"][field] = value
    path.write_text(json.dumps(described))
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(config_of(tmp_path), lambda stage, fraction: None)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "reason"),
    [
        (PACKED, "weight_scale", lambda scales: scales[:, :-1], r"weight_scale: \[64, 2\] of BF16, not \[64, 3\]"),
        (PACKED, "weight_scale", lambda scales: scales * torch.nan, r"scales: not all are finite"),
        (PACKED, "weight_scale", lambda scales: None, r"weight_scale: is not in the checkpoint"),
        (PACKED, "weight_zero_point", lambda zeros: None, r"weight_zero_point: is not in the checkpoint, though"),
        (PACKED, "weight_shape", lambda shape: shape + 1, r"weight_shape: \[65, 97\], not \[64, 96\]"),
        (PACKED, "weight_packed", lambda packed: packed.long(), r"weight_packed: \[64, 12\] of I64, not .* of int32"),
        (
            PACKED,
            "weight_g_idx",
            lambda _: torch.arange(96).int(),
            r"weight_g_idx: 95 is not a group: groups are 0 to 2",
        ),
        (PACKED, "weight_g_idx", lambda _: torch.zeros(96).int(), r"weight_g_idx: groups that are not of 32 inputs"),
        (GPTQ, "g_idx", lambda order: order - 1, r"g_idx: -1 is not a group: groups are 0 to 2"),
        (GPTQ, "qzeros", lambda zeros: zeros[:-1], r"qzeros: \[2, 8\] of I32, not \[3, 8\] of int32"),
        (GPTQ, "scales", lambda scales: scales / 0, r"scales: not all are finite"),
        ("awq", "qweight", lambda words: words.T, r"qweight: \[8, 96\] of I32, not \[96, 8\] of int32"),
        (FP8, "weight_scale_inv", lambda scales: scales * torch.nan, r"scales: not all are finite"),
        (FP8, "weight_scale_inv", lambda scales: scales[:, :1], r"weight_scale_inv: \[1, 1\] of F32, not .*\[1, 2\]"),
        (NVFP4, "weight_scale", lambda scales: scales[:, :3], r"weight_scale: \[64, 3\] of F8_E4M3, not \[64, 6\] of"),
        (NVFP4, "weight_global_scale", lambda total: total * 0, r"scales: not all are finite"),
        (NVFP4, "weight_global_scale", lambda total: None, r"weight_global_scale: is not in the checkpoint"),
        (MODELOPT, "weight_scale_2", lambda total: total * torch.nan, r"scales: not all are finite"),
        (MODELOPT, "weight", lambda codes: codes[:-1], r"weight: \[63, 48\] of U8, not \[64, 48\] of uint8"),
        (MODELOPT, "pre_quant_scale", lambda _: torch.ones(96), r"pre_quant_scale: scaled inputs \(AWQ\) are not"),
        (FP8, "weight", lambda codes: (codes.float() * torch.nan).to(codes.dtype), r"weight: holds NaN"),
    ],
)
def test_a_tensor_that_does_not_match_its_format_is_rejected(
    name: str, tensor: str, change: Any, reason: str, tmp_path: Path
) -> None:
    write(tmp_path, name)
    path, key = tmp_path / "model.safetensors", f"{LAYER}.{tensor}"
    stored = load_file(path)
    changed = change(stored.pop(key, None))
    if changed is not None:
        stored[key] = changed.contiguous()
    save_file(stored, path, metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match=rf"{LAYER}.{reason}"):
        load_model(config_of(tmp_path), lambda stage, fraction: None)


@pytest.mark.parametrize("name", [PACKED, GPTQ, "awq", FP8])
def test_a_truncated_quantized_file_is_rejected(name: str, tmp_path: Path) -> None:
    write(tmp_path, name)
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 7, 2000, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ModelRefusedError, match="cut off"):
            load_model(config_of(tmp_path), lambda stage, fraction: None)


def test_modelopt_settings_are_read_from_a_separate_file(tmp_path: Path) -> None:
    numbers = write(tmp_path, MODELOPT)
    described = json.loads((tmp_path / "config.json").read_text())
    del described["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    loaded, _ = load_model(config_of(tmp_path), lambda stage, fraction: None)
    assert torch.equal(loaded.get_submodule(LAYER).grouped.dequantised(), numbers[LAYER])
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(ModelRefusedError, match=r"hf_quant_config.json does not describe a quantization"):
        load_model(config_of(tmp_path), lambda stage, fraction: None)


def test_weights_in_several_files_are_found_in_all(tmp_path: Path) -> None:
    numbers = write(tmp_path, GPTQ)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {key: f"model-{number % 2}.safetensors" for number, key in enumerate(sorted(stored))}
    for file in set(names.values()):
        part = {key: stored[key] for key in stored if names[key] == file}
        save_file(part, tmp_path / file, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    loaded, _ = load_model(config_of(tmp_path), lambda stage, fraction: None)
    for path, weight in numbers.items():
        assert torch.equal(loaded.get_submodule(path).grouped.dequantised(), weight)
