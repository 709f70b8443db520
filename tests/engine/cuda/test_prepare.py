"""Loading on a GPU, with a fake device: pages, recordings, rejections and fallbacks."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from betoken.engine.attention import register_attention
from betoken.engine.bring_up import examine
from betoken.engine.bring_up import load as load_module
from betoken.engine.bring_up import prepare as prepare_module
from betoken.engine.bring_up.examine import Examined, _probe
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import eager_logits
from betoken.engine.config import EngineConfig
from betoken.engine.cuda import prepare, row_experts
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.memory import MemoryUse
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.errors import ModelRefusedError
from betoken.engine.forward import Forward, ModelCall
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.checkpoint import Progress
from tests.engine.cuda.harness import FakeRecorder
from tests.engine.rank_threads import joined
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
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="float32", attn_implementation="betoken").eval()
    chosen: dict[str, Any] = {"max_num_batched_tokens": 40, "compile": "off"} | settings
    config = EngineConfig(saved, dtype="float32", **chosen)
    return prepare.prepare_cuda(
        config, model, 640, _probe(model, 640)[0], lambda stage, fraction: STAGES.append(fraction)
    )


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


def test_forwards_of_pipeline_stages_are_not_recorded() -> None:
    with joined(2, 2) as groups:
        assert not prepare._recorded_sizes(EngineConfig("m", ranks=groups[0]))
    with joined(1) as groups:
        assert prepare._recorded_sizes(EngineConfig("m", ranks=groups[0]))


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
    prepared = run(tmp_path, family, max_num_batched_tokens=200, max_graph_rows=16)
    assert prepared is not None and recorder.num_recorded == 1
    # Two layers of two products, two experts a row: every height of a tile is met before the recording.
    assert num_visits[:20] == [visits for visits in (400, 200, 100, 50, 32) for _ in range(4)]
    num_visits.clear()
    assert run(tmp_path, family, batch_invariant=False) is not None and num_visits == []


def test_a_forward_that_cannot_be_recorded_runs_eagerly_with_the_reason(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(call: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", fail)
    with caplog.at_level(logging.WARNING):
        prepared = run(tmp_path)
    assert prepared is not None and "not permitted" in caplog.text
    assert prepared[0].run_padding(3)[0].shape == (3, 101)


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


def load(directory: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[ModelRunner, list[str]]:
    """A runner over the fake device, and its compilations, one per attempt: none is left at the next."""
    tried: list[str] = []
    made: list[ReferenceType[Forward]] = []

    def prepare_fake(config: EngineConfig, examined: Examined, progress: Progress) -> tuple[Forward, int]:
        tried.append(config.compile)
        model, max_context = examined.model, examined.info.max_context
        assert [forward for forward in made if forward() is not None] == []
        prepared = prepare.prepare_cuda(config, model, max_context, examined.shapes, progress)
        prepared = prepared or plain(config, examined, progress)
        made.append(ref(prepared[0]))
        return prepared

    plain = prepare_module.prepare
    monkeypatch.setattr(load_module, "prepare", prepare_fake)
    monkeypatch.setattr(prepare_module, "_kernels_for", lambda *arguments: None)
    config = EngineConfig(save_tiny(directory, "llama"), **({"dtype": "float32"} | settings))  # type: ignore[arg-type]
    return load_runner(config), tried


def fail_to_compile(*arguments: object) -> None:
    raise RuntimeError("it reads the weather")


def compile_wrongly(call: ModelCall, *rest: object) -> ModelCall:
    return lambda *tensors: tuple(result + 1 for result in call(*tensors))


@pytest.mark.parametrize(
    ("compile_call", "warning"),
    [(fail_to_compile, "reads the weather"), (compile_wrongly, "eager forward on average")],
)
def test_a_model_rejected_as_compiled_is_tried_eagerly_against_its_own_layers(
    compile_call: Callable[..., ModelCall],
    warning: str,
    recorder: FakeRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[bool] = []

    def ask(model: torch.nn.Module, sequences: list[list[int]]) -> list[torch.Tensor]:
        asked.append(any(isinstance(module, RowLinear) for module in model.modules()))
        return eager_logits(model, sequences)

    monkeypatch.setattr(examine, "eager_logits", ask)
    monkeypatch.setattr("betoken.engine.cuda.forward.compile_call", compile_call)
    loaded, tried = load(tmp_path, monkeypatch)
    assert tried == ["auto", "off"] and asked == [False]
    assert not loaded.is_compiled and "fake, eager" in loaded.numerics
    assert sum(warning in record.message for record in caplog.records) == 1
    with pytest.raises(ModelRefusedError, match=warning):
        load(tmp_path, monkeypatch, compile="on")


def test_a_fault_unrelated_to_compiling_is_rejected_at_once(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_measured: list[int] = []

    def measure(run: Callable[[], object], device: torch.device) -> MemoryUse:
        num_measured.append(1)
        return MemoryUse(39 * PAGE_BYTES, 0)

    monkeypatch.setattr(prepare, "measure_forward", measure)
    with pytest.raises(ModelRefusedError, match="max_context"):
        load(tmp_path, monkeypatch)
    assert len(num_measured) == 1 and "eagerly" not in caplog.text


def test_the_reference_path_is_taken_once_and_not_for_want_of_compiling(
    recorder: FakeRecorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x.cumsum(-1)))
    loaded, tried = load(tmp_path, monkeypatch)
    assert tried == ["auto"] and "reference" in loaded.numerics
    assert "aten.cumsum" in caplog.text and "compil" not in caplog.text


def test_memory_of_joined_weights_is_freed_before_graphs_are_recorded(
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

    monkeypatch.setattr("betoken.engine.cuda.forward.compile_call", compile_call)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("give back"))
    monkeypatch.setattr(recorder, "record", record_too)
    assert run(tmp_path, compile="on", max_graph_rows=16) is not None
    assert done == ["compile", "give back", "record"]
