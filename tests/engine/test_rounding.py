"""Dense checkpoints rounded as they are loaded: how far numbers move, what stays dense, and fingerprints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.bench.near_tie import is_near_tie
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import GroupedLinear
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.rounding import GROUPS, rounded
from tests.engine import quantized_files as files
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny import save_tiny

LARGEST = {"int8": 127, "int4": 7}


def config_of(path: Any, quantize: Any, dtype: Any = "float32") -> EngineConfig:
    return EngineConfig(str(path), dtype=dtype, quantize=quantize, num_pages=32, compile="off", self_check=False)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("shape", [(7, 96), (33, 300), (5, 31), (1, 128)])
def test_a_rounded_weight_moves_by_half_a_step_at_most(kind: Any, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    weight[0, :32] = 0
    grouped = rounded(kind, weight)
    step = grouped.scales.float().repeat_interleave(GROUPS[kind], dim=1)[:, : shape[1]]
    moved = (grouped.dequantised() - weight).abs()
    # The largest number of a group ends at most at its last code, whose scale was rounded to 8 bits.
    assert bool((moved <= step * (0.5 + LARGEST[kind] * 2**-8)).all())
    assert bool(
        (
            moved[weight.abs() < step * (LARGEST[kind] - 1)] <= 0.5001 * step[weight.abs() < step * (LARGEST[kind] - 1)]
        ).all()
    )
    assert torch.equal(grouped.dequantised()[0, :31], torch.zeros(31))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_equal_those_of_the_rounded_model(family: str, kind: Any, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, family)
    runner = load_runner(config_of(directory, kind))
    loaded, _ = load_model(config_of(directory, kind), lambda stage, fraction: None)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    layers = {path: layer for path, layer in loaded.named_modules() if isinstance(layer, GroupedLinear)}
    assert len(layers) == {"llama": 14, "gpt2": 8}[family] and layers.keys().isdisjoint({"lm_head"})
    for path, layer in layers.items():
        own, numbers = plain.get_submodule(path), layer.grouped.dequantised()
        own.weight.data = numbers if family == "llama" else numbers.T.contiguous()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    expected = plain.generate(torch.tensor([[1, 2, 3, 4, 5]]), **options)[0].tolist()
    ours, theirs = forward_together(runner, [expected])[0], plain(torch.tensor([expected])).logits[0]
    for place in range(4, len(expected) - 1):
        if ours[place].argmax() != expected[place + 1]:
            best = [logits[place].topk(2).values for logits in (ours, theirs)]
            assert is_near_tie(*(float(two[0] - two[1]) for two in best))
            break


def test_loading_reports_the_rounded_share_of_the_weights(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    load_model(config_of(save_tiny(tmp_path, "llama"), "int4"), lambda stage, fraction: told.append((stage, fraction)))
    fractions = [fraction for stage, fraction in told if stage == "rounding weights to int4"]
    assert len(set(fractions)) == 14, "once for every layer"
    assert fractions == sorted(fractions) and fractions[-1] < 1
    assert [fraction for _, fraction in told] == sorted(fraction for _, fraction in told)


def test_fingerprints_and_arithmetic_distinguish_rounded_models(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    runners = [load_runner(config_of(directory, kind)) for kind in (None, "int8", "int4")]
    assert len({runner.info.weights_fingerprint for runner in runners}) == 3
    assert len({runner.numerics for runner in runners}) == 3
    assert len({runner.info.num_parameters for runner in runners}) == 1


def test_rounding_a_quantized_checkpoint_is_rejected(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    files.write_quantized(tmp_path, files.awq_config(32), files.store_awq(32))
    with pytest.raises(ModelRefusedError, match=r"quantize: int8: .* is quantized already, by 'awq'"):
        load_model(config_of(tmp_path, "int8"), lambda stage, fraction: None)
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelRefusedError, match=r"quantize: int4: .*tiny.gguf is a GGUF file"):
        load_model(config_of(path, "int4"), lambda stage, fraction: None)


def test_an_unknown_rounding_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantize: 'int3' is not one of int8, int4"):
        config_of(tmp_path, "int3")
