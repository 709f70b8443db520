"""Results of an earlier start that a start of the same model, code and machine need not compute again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from betoken.engine.bring_up import examine, kept, load, step_costs
from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.step_costs import StepCost, kept_step_costs
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from tests.engine.tiny import save_tiny

Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Loads a model; returns how often its own forward has run so far."""
    num_runs = [0]
    run = examine.eager_logits

    def counted(*args: Any) -> Any:
        num_runs[0] += 1
        return run(*args)

    def start(family: str = "llama", **settings: Any) -> int:
        directory = tmp_path / family
        model = str(directory) if directory.exists() else save_tiny(directory, family)
        options = {"num_pages": 64, "compile": "off", "reuse_self_check": True} | settings
        load_runner(EngineConfig(model, **options))
        return num_runs[0]

    monkeypatch.setattr(examine, "eager_logits", counted)
    monkeypatch.setattr(kept, "user_cache_dir", lambda: tmp_path / "cache")
    return start


def test_a_check_at_load_that_passed_is_not_repeated(start: Start) -> None:
    assert [start(), start(), start()] == [1, 1, 1]
    assert start(reuse_self_check=False) == 2


def test_a_check_at_load_is_known_for_compiled_models_too(start: Start) -> None:
    assert [start(compile="auto"), start(compile="auto")] == [1, 1]
    assert start() == 2


@pytest.mark.parametrize(
    "settings", [{"family": "qwen3"}, {"dtype": "float32"}, {"num_layers": 1}, {"max_num_batched_tokens": 64}], ids=str
)
def test_a_check_at_load_is_repeated_for_another_model_or_settings(start: Start, settings: dict[str, Any]) -> None:
    assert [start(), start(**settings), start(**settings)] == [1, 2, 2]


@pytest.mark.parametrize("part", ["_software", "_processor"])
def test_a_check_at_load_is_repeated_for_other_code_or_processors(
    start: Start, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start() == 1
    monkeypatch.setattr(kept, part, lambda: ["another"])
    assert start() == 2


def test_a_failed_check_at_load_is_not_kept(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ModelRefusedError("a logit differs")

    with monkeypatch.context() as patch:
        patch.setattr(load, "check_against_eager", fail)
        for _ in range(2):
            with pytest.raises(ModelRefusedError, match="a logit differs"):
                start()
    assert [start(), start()] == [3, 3]


def test_a_check_at_load_is_repeated_if_the_logits_are_others(start: Start, tmp_path: Path) -> None:
    assert start() == 1
    (file,) = (tmp_path / "cache" / "kept").iterdir()
    passed = file.read_text()
    file.write_text(json.dumps({"eager": "0" * 64}))
    assert start() == 2 and file.read_text() == passed
    file.write_text("no JSON")
    assert [start(), start()] == [3, 3]


def test_kept_results_make_room_for_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_MAX_KEPT", 2)
    results = [KeptResult(tmp_path, "a", number) for number in range(4)]
    for number, result in enumerate(results):
        result.write(number)
        os.utime(result._path, (number, number))
    assert [result.read() for result in results[2:]] == [2, 3]
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_step_times_are_scaled_on_a_busier_machine_and_measured_again_on_a_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns, num_measured = 1000, [0]
    runner = load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=64, compile="off", self_check=False))

    def measure(runner: ModelRunner) -> list[StepCost]:
        num_measured[0] += 1
        return [StepCost(rows, context, now_ns * rows) for rows, context in step_costs._points(runner)]

    monkeypatch.setattr(step_costs, "_time_forward", lambda *args: now_ns)
    monkeypatch.setattr(step_costs, "measure_step_costs", measure)
    first = kept_step_costs(runner, KeptResult(tmp_path, "step-times"))
    now_ns = 1400
    assert kept_step_costs(runner, KeptResult(tmp_path, "step-times")) == first and num_measured == [1]
    now_ns = 1600
    scaled = kept_step_costs(runner, KeptResult(tmp_path, "step-times"))
    assert [cost.ns for cost in scaled] == [1600 * cost.rows for cost in first] and num_measured == [1]
    now_ns = 600
    assert kept_step_costs(runner, KeptResult(tmp_path, "step-times"))[0].ns == 600 and num_measured == [2]
