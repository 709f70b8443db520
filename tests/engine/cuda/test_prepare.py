"""What a load does on a GPU, with the device's answers made up: pages, recordings, and what is refused or given up."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from foretoken.engine.attention import register_attention
from foretoken.engine.config import EngineConfig
from foretoken.engine.cuda import prepare, row_experts
from foretoken.engine.cuda.forward import CudaForward
from foretoken.engine.cuda.memory import MemoryUse
from foretoken.engine.errors import ModelRefusedError
from foretoken.engine.runner import _probe
from tests.engine.cuda.test_forward import FakeRecorder
from tests.engine.tiny import MIXTURES, save_tiny

PAGE_BYTES = 2 * 16 * 2 * (16 + 16) * 4  # two layers, 16 slots, two heads, keys and values of 16, float32
MEASURED_BYTES = 1000 * PAGE_BYTES


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """A device that answers; its recorder."""
    made = FakeRecorder()

    def measure(run: Callable[[], object], device: torch.device) -> MemoryUse:
        run()
        return MemoryUse(free_bytes=MEASURED_BYTES, forward_bytes=0)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "the user's own")
    monkeypatch.setattr(prepare, "_name", lambda config, device: "fake")
    monkeypatch.setattr(prepare, "measure_forward", measure)
    monkeypatch.setattr(prepare, "GraphRecorder", lambda: made)
    return made


def run(directory: Path, family: str = "llama", **settings: object) -> tuple[CudaForward, int] | None:
    register_attention()
    saved = save_tiny(directory, family)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="float32", attn_implementation="foretoken").eval()
    config = EngineConfig(saved, dtype="float32", **({"max_batch_rows": 40} | settings))  # type: ignore[arg-type]
    return prepare.prepare_cuda(config, model, 640, _probe(model, 640), lambda stage, fraction: STAGES.append(fraction))


STAGES: list[float] = []


@pytest.mark.parametrize(
    ("settings", "num_pages"),
    [
        ({"kv_memory_fraction": 0.5}, 499),
        ({"num_pages": 77}, 77),
        ({"kv_memory_bytes": 200 * PAGE_BYTES}, 200),
        ({"kv_memory_bytes": 7 * PAGE_BYTES}, 7),
    ],
)
def test_pages_are_what_is_asked_for_or_what_is_left(
    settings: dict[str, object], num_pages: int, recorder: FakeRecorder, tmp_path: Path
) -> None:
    STAGES.clear()
    prepared = run(tmp_path, **settings)
    assert prepared is not None and prepared[1] == num_pages
    assert recorder.num_recorded == 3  # 16, 32 and 48 rows
    assert STAGES == sorted(STAGES) and STAGES[0] >= 0.2 and STAGES[-1] < 0.3


@pytest.mark.parametrize(("max_graph_rows", "num_recorded"), [(0, 0), (16, 1), (4096, 3)])
def test_graphs_are_recorded_as_far_as_forwards_go(
    max_graph_rows: int, num_recorded: int, recorder: FakeRecorder, tmp_path: Path
) -> None:
    assert run(tmp_path, max_graph_rows=max_graph_rows) is not None
    assert recorder.num_recorded == num_recorded


def test_kernels_are_kept_with_the_worker_s_other_code_unless_the_user_says_where(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tmp_path, cache_dir=tmp_path / "cache") is not None
    assert os.environ["TRITON_CACHE_DIR"] == "the user's own"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert run(tmp_path, cache_dir=tmp_path / "cache") is not None
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")


def test_an_operator_that_is_not_known_is_left_to_the_reference_path(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.cumsum(-1)))
    assert run(tmp_path) is None
    assert "aten.cumsum" in caplog.text and recorder.num_recorded == 0
    assert run(tmp_path, batch_invariant=False) is not None


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_run_as_they_lie_unless_rows_may_depend_on_each_other(
    family: str, recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_visits: list[int] = []
    product = row_experts._row_product

    def count(module: object, name: str, rows: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        num_visits.append(len(expert_ids))
        return product(module, name, rows, expert_ids)

    monkeypatch.setattr(row_experts, "_row_product", count)
    prepared = run(tmp_path, family, max_batch_rows=200, max_graph_rows=16)
    assert prepared is not None and recorder.num_recorded == 1
    # Two layers of two products, two experts a row: every height of a tile is met before the recording.
    assert num_visits[:20] == [visits for visits in (400, 200, 100, 50, 32) for _ in range(4)]
    num_visits.clear()
    assert run(tmp_path, family, batch_invariant=False) is not None and num_visits == []


def test_what_cannot_be_recorded_runs_eagerly_and_says_why(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", fail)
    with caplog.at_level(logging.WARNING):
        prepared = run(tmp_path)
    assert prepared is not None and "not permitted" in caplog.text
    assert prepared[0].run_padding(3).shape == (3, 101)


def test_a_device_without_the_memory_is_refused(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "measure_forward", lambda run, device: MemoryUse(39 * PAGE_BYTES, 0))
    with pytest.raises(ModelRefusedError, match="max_context"):
        run(tmp_path)

    def fail(run: Callable[[], object], device: torch.device) -> MemoryUse:
        raise torch.OutOfMemoryError("39 bytes short")

    monkeypatch.setattr(prepare, "measure_forward", fail)
    with pytest.raises(ModelRefusedError, match="39 bytes short"):
        run(tmp_path)


def test_a_device_that_multiplies_differently_in_company_is_refused(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "find_row_dependence", lambda model: "a row changes")
    with pytest.raises(ModelRefusedError, match="a row changes"):
        run(tmp_path)
    assert run(tmp_path, batch_invariant=False) is not None


def test_a_model_that_cannot_be_compiled_is_refused_when_it_was_asked_for(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("it reads the weather")

    monkeypatch.setattr("foretoken.engine.cuda.forward.compile_call", fail)
    with pytest.raises(ModelRefusedError, match="reads the weather"):
        run(tmp_path, compile="on")
    prepared = run(tmp_path, compile="auto")
    assert prepared is not None and not prepared[0].is_compiled


def test_what_joining_weights_left_is_given_back_before_graphs_are_recorded(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    record = recorder.record

    def compile_call(call: object, *rest: object) -> object:
        done.append("compile")
        return call

    def record_too(call: Callable[[], None]) -> Callable[[], None]:
        done.append("record")
        return record(call)

    monkeypatch.setattr("foretoken.engine.cuda.forward.compile_call", compile_call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("give back"))
    monkeypatch.setattr(recorder, "record", record_too)
    assert run(tmp_path, compile="on", max_graph_rows=16) is not None
    assert done == ["compile", "give back", "record"]
