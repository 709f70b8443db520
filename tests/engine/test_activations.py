"""int8 activations of a loaded model: the check at load, numerics, batch invariance, typed refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.cpu import rounding_check
from betoken.engine.cpu.grouped_linear import PackedGroupedLinear
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.activations import exact_rows, rounds_rows
from tests.engine.gguf_files import write_gguf
from tests.engine.mixture_files import ORDERED, save_both, store_ordered
from tests.engine.tiny import save_tiny

SEQUENCES = [[1, 2, 3, 4, 5], list(range(30, 60)), [7]]


def load(path: str, activations: str, **options: Any) -> ModelRunner:
    config: dict[str, Any] = {"num_pages": 64, "compile": "off", "activations": activations} | options
    return load_runner(EngineConfig(path, **config))


def num_rounding(runner: ModelRunner) -> int:
    """Layers that round their rows."""
    layers = (m for m in runner.parts._model.modules() if isinstance(m, PackedGroupedLinear))
    return sum(layer.rounds_rows for layer in layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "Q4_0", "Q2_K", "Q3_K"])
def test_an_int8_model_of_a_type_passes_its_check_and_has_other_logits(
    type_name: str, dtype: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name)
    exact, rounding = load(path, "exact", dtype=dtype), load(path, "int8", dtype=dtype)
    assert num_rounding(exact) == 0 and num_rounding(rounding) == 15
    logits, others = (torch.cat(forward_together(runner, SEQUENCES)) for runner in (exact, rounding))
    assert 0 < (logits - others).abs().mean() < 0.1 * logits.abs().mean()


def test_int8_rows_of_a_model_have_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    runner = load(write_gguf(tmp_path / "tiny.gguf", "Q4_K"), "int8", compile="on")
    together = forward_together(runner, SEQUENCES)
    for ids, logits in zip(SEQUENCES, together, strict=True):
        for size in (1, 6, 32):
            assert torch.equal(forward_in_chunks(runner, ids, size), logits)


def test_numerics_name_int8_activations_and_weights_keep_their_fingerprint(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K")
    exact, rounding, chosen = (load(path, name, self_check=False) for name in ("exact", "int8", "auto"))
    assert exact.info.weights_fingerprint == rounding.info.weights_fingerprint
    assert "int8 activations" in rounding.numerics and "int8 activations" not in exact.numerics
    assert exact.logits_digest != rounding.logits_digest and chosen.numerics == rounding.numerics


@pytest.mark.parametrize(
    ("type_name", "options", "reason"),
    [
        ("F32", {}, "has no linear layer with quantised weights of these kinds"),
        ("IQ4_NL", {}, "has no linear layer with quantised weights of these kinds"),
        ("Q4_K", {"dtype": "float16"}, "dtype float16 has no kernel"),
    ],
)
def test_int8_activations_without_a_kernel_are_rejected_and_auto_is_exact(
    type_name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name)
    with pytest.raises(ModelRefusedError, match=f"activations: int8: .*{reason}; kernels exist for int2, .* on a CPU"):
        load(path, "int8", **options)
    assert "int8 activations" not in load(path, "auto", self_check=False, **options).numerics


def test_int8_activations_of_a_dense_checkpoint_need_rounded_weights(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    with pytest.raises(ModelRefusedError, match="activations: int8"):
        load(directory, "int8")
    assert "int8 activations" in load(directory, "int8", quantize="int4").numerics


@pytest.mark.parametrize("choice", ["int8", "auto"])
def test_an_int8_layer_that_differs_from_its_definition_is_rejected(
    choice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding_check, "rounded", lambda rows: rows.float() * 1.02)
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K")
    with pytest.raises(ModelRefusedError, match=r"layers\.0\..*int8 activations give results"):
        load(path, choice)


def test_int8_experts_with_input_orders_are_checked_at_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, stored = save_both("mixtral", store_ordered, ORDERED, tmp_path)
    assert "int8 activations" in load(str(stored), "int8").numerics
    monkeypatch.setattr(rounding_check, "_check_linear", lambda *args: None)
    monkeypatch.setattr(rounding_check, "rounded", lambda rows: rows.float() * 1.02)
    with pytest.raises(ModelRefusedError, match=r"experts\..*int8 activations give results"):
        load(str(stored), "int8", reuse_self_check=False)


def test_layers_of_an_int8_model_are_exact_while_it_is_compared_with_its_own_forward(tmp_path: Path) -> None:
    model = load(write_gguf(tmp_path / "tiny.gguf", "Q4_K"), "int8").parts._model
    layer = next(module for module in model.modules() if isinstance(module, PackedGroupedLinear))
    rows = torch.randn(3, layer.num_inputs, dtype=torch.bfloat16)
    with exact_rows(model):
        exact = layer(rows)
        assert not rounds_rows(model)
    assert rounds_rows(model) and not torch.equal(exact, layer(rows))


def test_unknown_activations_are_rejected() -> None:
    with pytest.raises(ValueError, match="activations: 'int4' is not one of exact, int8, auto"):
        EngineConfig("m", activations="int4")  # type: ignore[arg-type]
