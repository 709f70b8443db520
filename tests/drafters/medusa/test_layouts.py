"""Heads of every published layout load and compute what the paper says; others are refused by name."""

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from betoken.drafters.medusa.adapters import describe
from betoken.drafters.medusa.hosting import _in_target
from betoken.drafters.medusa.module import MedusaHeads
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from tests.drafters.medusa.bench import HIDDEN, VOCAB
from tests.drafters.medusa.files import LAYOUTS, RandomHeads
from tests.engine.tiny import save_tiny

SHIPPED = Path(__file__).parents[3] / "models" / "medusa"


def target_head(target: ModelRunner) -> torch.Tensor:
    """[V, H] the target's output weight, as its head computes it."""
    with torch.inference_mode():
        return target.parts.head(torch.eye(HIDDEN)).T.clone()


@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_of_each_layout_compute_the_definition(
    layout: str, num_blocks: int, target: ModelRunner, tmp_path: Path
) -> None:
    written = RandomHeads(HIDDEN, VOCAB, num_heads=4, num_blocks=num_blocks)
    described = describe(written.save(tmp_path / "heads", layout), target)
    assert described.num_heads == 4, "counted from the tensors"
    heads = MedusaHeads(described, target.parts)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    logits = heads.spread(heads.logits(states), VOCAB)
    shared = target_head(target)
    for row, state in enumerate(states):
        for head in range(4):
            expected = written.logits(head, state, shared, layout)
            torch.testing.assert_close(logits[row, head], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(heads.logits(states[row : row + 1])[0], heads.logits(states)[row]), "rows stand alone"


def test_heads_inside_the_targets_checkpoint_are_found(tmp_path: Path) -> None:
    saved = Path(save_tiny(tmp_path / "target", "llama"))
    written = RandomHeads(HIDDEN, VOCAB)
    own = {f"medusa_head.{name}": tensor for name, tensor in written.tensors("v1").items()}
    save_file(load_file(saved / "model.safetensors") | own, saved / "model.safetensors", metadata={"format": "pt"})
    target = load_runner(EngineConfig(str(saved), dtype="float32", num_pages=64, compile="off"))
    layout = _in_target(target)
    assert layout is not None and layout.num_heads == 3
    state = torch.randn(1, HIDDEN)
    found = MedusaHeads(layout, target.parts).logits(state)[0, 2]
    torch.testing.assert_close(found, written.logits(2, state[0], torch.empty(0), "v1"), rtol=1e-4, atol=1e-4)


def test_a_target_without_heads_has_none(target: ModelRunner) -> None:
    assert _in_target(target) is None


@pytest.mark.parametrize("layout", ["v1", "v1.pt", "vllm"])
def test_heads_of_another_width_vocabulary_or_base_are_refused_by_name(
    layout: str, target: ModelRunner, tmp_path: Path
) -> None:
    wide = RandomHeads(HIDDEN + 16, VOCAB).save(tmp_path / "wide", layout)
    with pytest.raises(ModelRefusedError, match=r"0.*: \[80(, 80)?\]: must be \[64"):
        describe(wide, target)
    more = RandomHeads(HIDDEN, VOCAB + 1).save(tmp_path / "more", layout)
    with pytest.raises(ModelRefusedError, match=r"\[102, 64\]: must be \[101, 64\]"):
        describe(more, target)
    if layout != "vllm":  # whose config names no base
        other = RandomHeads(HIDDEN, VOCAB).save(tmp_path / "other", layout, base="vicuna-7b")
        with pytest.raises(ModelRefusedError, match="base_model_name_or_path: 'some/vicuna-7b': must be target"):
            describe(other, target)
    describe(RandomHeads(HIDDEN, VOCAB).save(tmp_path / "nameless", layout, base=""), target)


def break_file(directory: Path, fault: str) -> None:
    file = directory / "medusa_lm_head.safetensors"
    tensors = load_file(file)
    if fault == "gap":
        del tensors["1.0.linear.weight"]
    elif fault == "unknown":
        tensors["extra.weight"] = torch.zeros(1)
    elif fault == "quantized":
        tensors["0.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN, dtype=torch.int8)
    elif fault == "half an output":
        del tensors["2.1.weight"]
    elif fault == "half a bias":
        del tensors["2.0.linear.bias"]
    elif fault == "empty":
        tensors = {}
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:500])
    elif fault == "gone":
        file.unlink()
    elif fault == "config":
        (directory / "config.json").write_text("[]")
    else:
        save_file(tensors, file)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gap", "head 1 of 3 lacks the weight of its block 0"),
        ("unknown", "extra.weight is not a part"),
        ("quantized", "0.0.linear.weight is quantized"),
        ("half an output", "3 heads have 2 output layers"),
        ("half a bias", "some blocks have a bias"),
        ("empty", "no heads found"),
        ("cut", "medusa_lm_head.safetensors is not a safetensors file, or cut off"),
        ("gone", "there is none of medusa_lm_head.safetensors, medusa_lm_head.pt"),
        ("config", "config.json: must be an object"),
    ],
)
def test_files_without_medusa_heads_are_rejected_with_the_reason(
    fault: str, message: str, target: ModelRunner, tmp_path: Path
) -> None:
    directory = RandomHeads(HIDDEN, VOCAB).save(tmp_path / "heads", "v1")
    break_file(directory, fault)
    with pytest.raises(ModelRefusedError, match=message):
        describe(directory, target)


class Harmful:
    """Would run code where a pickle is loaded without care."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.trace,)


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_holds_code_is_refused_and_not_run(is_zip: bool, target: ModelRunner, tmp_path: Path) -> None:
    directory = RandomHeads(HIDDEN, VOCAB).save(tmp_path / "heads", "v1.pt")
    path = directory / "medusa_lm_head.pt"
    if is_zip:
        torch.save({"0.0.linear.weight": Harmful(tmp_path / "was here")}, path)
    else:
        path.write_bytes(pickle.dumps({"0.0.linear.weight": Harmful(tmp_path / "was here")}))
    with pytest.raises(ModelRefusedError, match=r"medusa_lm_head.pt"):
        describe(directory, target)
    assert not (tmp_path / "was here").exists()


@pytest.mark.parametrize("config", [{}, {"medusa_num_heads": 10**9}, {"medusa_num_heads": 1}])
def test_heads_are_counted_from_the_tensors(config: dict[str, int], target: ModelRunner, tmp_path: Path) -> None:
    directory = RandomHeads(HIDDEN, VOCAB, num_heads=5).save(tmp_path / "heads", "v2")
    (directory / "config.json").write_text(json.dumps(config))
    assert describe(directory, target).num_heads == 5


@pytest.mark.skipif(not SHIPPED.exists(), reason="a package without models")
def test_the_shipped_heads_fit_the_shipped_target() -> None:
    config = EngineConfig(str(SHIPPED.parent / "target"), compile="off", self_check=False, num_pages=16)
    target = load_runner(config)
    layout = describe(SHIPPED, target)
    logits = MedusaHeads(layout, target.parts).logits(torch.randn(2, target.parts.hidden_size, dtype=torch.bfloat16))
    assert logits.shape == (2, layout.num_heads, target.info.vocab_size) and bool(logits.isfinite().all())
