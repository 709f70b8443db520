"""Mixtures stored in MXFP4, as gpt-oss on the hub, or in blocks of FP8: served as the numbers they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import ExpertWeights
from betoken.engine.weights.loading import load_model
from tests.engine.mixture_files import FP8, ORDERED, WAYS, save_both, store_fp8, store_ordered


def config_of(directory: Path, dtype: Any = "float32") -> EngineConfig:
    return EngineConfig(str(directory), dtype=dtype, num_pages=16, compile="off", self_check=False)


@pytest.mark.parametrize(("family", "store", "quantization"), WAYS)
def test_quantized_experts_stay_packed_and_have_the_same_numbers(
    family: str, store: Any, quantization: dict[str, Any], tmp_path: Path
) -> None:
    plain, packed = save_both(family, store, quantization, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(plain)
    ours, info = load_model(config_of(packed), lambda stage, fraction: None)
    experts = {path: module for path, module in ours.named_modules() if isinstance(module, ExpertWeights)}
    assert len(experts) == 4 and info.num_parameters == sum(weight.numel() for weight in theirs.parameters())
    for path, module in experts.items():
        numbers = module.grouped.dequantised().reshape(module.num_experts, module.num_outputs, -1)
        expected = theirs.get_parameter(path)
        assert (module.orders is not None) == (store is store_ordered)
        if module.orders is not None:
            assert len(module.orders.unique(dim=0)) == module.num_experts
            expected = expected.gather(2, module.orders.long()[:, None].expand(expected.shape))
        assert torch.equal(numbers, expected.transpose(1, 2) if family == "gpt_oss" else expected), path
    in_file = sum(
        weight.nbytes for name, weight in load_file(packed / "model.safetensors").items() if ".experts." in name
    )
    # Each output keeps the scale of its block: much for blocks of 16, 3 % for blocks of 128 as in checkpoints.
    more = 1.1 if family == "gpt_oss" else 1.25
    assert sum(module.grouped.num_bytes for module in experts.values()) <= more * in_file


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "store", "quantization"), WAYS)
def test_logits_of_quantized_experts_equal_those_of_dense_weights(
    family: str, store: Any, quantization: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    plain, packed = save_both(family, store, quantization, tmp_path)
    sequences = [[1, 2, 3, 4, 5], list(range(30, 70))]
    theirs, ours = (load_runner(config_of(directory, dtype)) for directory in (plain, packed))
    assert theirs.info.weights_fingerprint != ours.info.weights_fingerprint
    for left, right in zip(forward_together(theirs, sequences), forward_together(ours, sequences), strict=True):
        limit = 1e-5 if dtype == "float32" else 0.03
        assert (left - right).abs().mean() <= limit * left.abs().mean()


@pytest.mark.parametrize(("dtype", "way"), [("bfloat16", 1), ("float32", 1), ("float32", 2)])
def test_compiled_quantized_experts_give_the_same_logits(dtype: Any, way: int, tmp_path: Path) -> None:
    _, packed = save_both(*WAYS[way], tmp_path)
    eager = load_runner(config_of(packed, dtype))
    compiled = load_runner(EngineConfig(str(packed), dtype=dtype, num_pages=16, compile="on"))
    assert compiled.is_compiled
    for left, right in zip(*(forward_together(runner, [[1, 2, 3, 4, 5]]) for runner in (eager, compiled)), strict=True):
        assert (left - right).abs().mean() <= (1e-5 if dtype == "float32" else 0.03) * left.abs().mean()


@pytest.mark.parametrize(
    ("quantization", "changes", "reason"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            {},
            r"gptq: .*experts.0.w[12]: weight, weight_scale_inv: not the tensors",
        ),
        (FP8, {"0.w1.weight_scale_inv": None}, r"fp8: .*experts.0.w1.weight_scale_inv: is not in the checkpoint"),
        (FP8, {"3.w2.weight": None}, r"fp8: .*experts.3.w2: weight_scale_inv: not the tensors of the format"),
        (FP8, {"3.w2.weight": None, "3.w2.weight_scale_inv": None}, r"fp8: .*experts.0.w2: not one of 4 experts"),
        (FP8, {"1.w3.weight_scale_inv": torch.full((6, 4), torch.nan)}, r"fp8: .*experts.1.w3.scales: not all are"),
        (FP8, {"1.w3.weight_scale_inv": torch.ones(6, 3)}, r"fp8: .*experts.1.w3.weight_scale_inv: \[6, 3\] of F32"),
    ],
)
def test_other_quantized_experts_are_rejected(
    quantization: Any, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _, packed = save_both("mixtral", store_fp8, quantization, tmp_path)
    stored = load_file(packed / "model.safetensors")
    for name, tensor in changes.items():
        key = next(key for key in stored if key.endswith(f"layers.1.block_sparse_moe.experts.{name}"))
        del stored[key]
        if tensor is not None:
            stored[key] = tensor
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match=reason):
        load_model(config_of(packed), lambda stage, fraction: None)


def test_an_expert_whose_layers_are_in_two_orders_is_refused(tmp_path: Path) -> None:
    _, packed = save_both("mixtral", store_ordered, ORDERED, tmp_path)
    stored = load_file(packed / "model.safetensors")
    key = next(key for key in stored if key.endswith("layers.1.block_sparse_moe.experts.2.w3.g_idx"))
    stored[key] = stored[key].flip(0).contiguous()
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="g_idx: the layers of one expert have their inputs in different"):
        load_model(config_of(packed), lambda stage, fraction: None)


def test_quantized_blocks_that_are_not_experts_are_rejected(tmp_path: Path) -> None:
    _, packed = save_both(*WAYS[0], tmp_path)
    stored = load_file(packed / "model.safetensors")
    stored["model.layers.0.self_attn.q_proj_blocks"] = torch.zeros(1, dtype=torch.uint8)
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="mxfp4: model.layers.0.self_attn.q_proj_blocks: not a weight of"):
        load_model(config_of(packed), lambda stage, fraction: None)


def test_a_scale_of_nan_is_rejected(tmp_path: Path) -> None:
    _, packed = save_both(*WAYS[0], tmp_path)
    stored = load_file(packed / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = 255
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefusedError, match="mxfp4: model.layers.1.mlp.experts.scales: not all are finite"):
        load_model(config_of(packed), lambda stage, fraction: None)
