"""The two commands without a GPU, and their GPU code at a small size on the CPU."""

from itertools import chain
from types import ModuleType

import pytest
import torch

from betoken.bench import kernels, step
from betoken.bench.gpu.case import Case
from betoken.bench.gpu.paged_cases import Shape, paged_cases
from betoken.bench.gpu.product_cases import product_cases
from betoken.bench.gpu.sampling_cases import peaked_logits, sampling_cases
from betoken.bench.gpu.state_cases import Layer, state_cases
from betoken.bench.gpu.step_baseline import StaticCacheSteps
from betoken.bench.gpu.step_models import MODEL_NAMES, describe, make_model, read_bytes, share_weights
from betoken.engine.bring_up.load import runner_of
from betoken.engine.config import EngineConfig
from betoken.kernels import dispatch

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 301,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}
SMALL_LAYERS = (
    Layer("delta", 2, 4, 16, 12, is_delta=True),
    Layer("plain", 2, 4, 16, 12, is_delta=False),
    Layer("rates", 1, 1, 16, 40, is_delta=False, has_rates=True),
)
CASES = list(
    chain(
        sampling_cases(CPU, vocab_size=600, row_counts=(3,)),
        paged_cases(CPU, Shape(num_heads=4, num_key_heads=2, size=16), max_context=40),
        state_cases(CPU, SMALL_LAYERS, 40, 3),
        product_cases(CPU, layers=((24, 40),), experts=((5, 24, 40),)),
    )
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize("command", [kernels, step])
def test_without_a_gpu_the_command_says_so_in_one_line(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert command.PROGRAM in printed.err and "no CUDA device" in printed.err


def test_a_name_that_is_no_op_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Copies:
        """A device that copies; nothing else is asked of it."""

        def copy_bytes_per_s(self) -> float:
            return 1.0

    monkeypatch.setattr(kernels, "require_device", lambda program: CPU)
    monkeypatch.setattr(kernels, "DeviceTimer", lambda device: Copies())
    monkeypatch.setattr(kernels, "describe_device", lambda device: {})
    for name in ("sampling_cases", "paged_cases", "state_cases", "product_cases"):  # theirs would be large
        monkeypatch.setattr(kernels, name, lambda device: CASES)
    assert kernels.main(["--only", "atention"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "no op is named atention" in printed.err


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.op} {case.shape}")
def test_every_cases_inputs_are_fresh_and_suit_the_op(case: Case) -> None:
    first, second = case.fresh(), case.fresh()
    assert any(not torch.equal(a, b) for a, b in zip(first, second, strict=True) if isinstance(a, torch.Tensor))
    with dispatch.override("reference"):
        outputs = case.run(*first)
    assert case.num_bytes > 0 and all(isinstance(output, torch.Tensor) for output in outputs)
    eager = next(side for side in case.others if side.name.startswith("torch eager"))
    eager.call(*second)


def test_logits_are_peaked_as_stated() -> None:
    logits = peaked_logits(3, 5000, torch.float32, CPU)
    top = logits.sort(dim=1, descending=True).values[:, :10]
    assert torch.equal(top, (16 - torch.arange(10) / 2).expand(3, 10))


def test_read_bytes_leave_out_a_table_that_is_only_looked_up() -> None:
    untied = make_model("llama-3-8b", CPU, **SMALL)
    tied = make_model("llama-3-1b", CPU, **SMALL)
    table = 301 * 64 * 2
    num_parameters = [sum(parameter.numel() for parameter in model.parameters()) for model in (untied, tied)]
    assert read_bytes(untied) == 2 * num_parameters[0] - table and read_bytes(tied) == 2 * num_parameters[1]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_our_steps_and_transformers_steps_choose_alike(name: str) -> None:
    torch.manual_seed(0)
    model = make_model(name, CPU, torch.float32, initializer_range=0.2, **SMALL)
    twin = share_weights(model)
    assert all(a is b for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    config = EngineConfig("random", dtype="float32", num_pages=8, compile="off")
    stream = step.Stream(runner_of(config, model, describe(name, model)), list(range(3, 40)), 6)
    baseline = StaticCacheSteps(twin, list(range(3, 40)), 6, is_compiled=False)
    with torch.inference_mode():
        for block in ([5, 6, 7, 8, 9, 10], [90, 80, 70, 60, 50, 40]):
            assert stream.step(block) == baseline.step(block)
    assert step.find_faults(stream, stream, [[5, 6, 7], [11]]) == []
    stream.close()


def test_a_step_whose_rows_differ_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    class Off:
        """Logits that depend on the number of rows."""

        def logits(self, block: list[int], offset: int = 0) -> torch.Tensor:
            return torch.full((len(block), 3), float(len(block)))

    class Other:
        def logits(self, block: list[int], offset: int = 0) -> torch.Tensor:
            return torch.full((len(block), 3), 1.0)

    faults = step.find_faults(Off(), Off(), [[1, 2]])  # type: ignore[arg-type]
    assert faults == ["2 rows: a row among them is not the row alone"]
    assert step.find_faults(Other(), Off(), [[1, 2]]) == ["2 rows: the recorded forward is not the eager one"]  # type: ignore[arg-type]
    step.print_report({"model": "random", "weights": "w4a16", "faults": faults})
    assert "no speeds" in capsys.readouterr().out


def test_only_the_named_ops_are_measured() -> None:
    assert {case.op for case in CASES} == {
        *("sample", "logits_adjust", "attention", "kv_write", "kv_compact", "linear"),
        *("linear_grouped", "expert_linear", "row_sum", "short_conv"),
        *("linear_recurrence", "state_conv"),
    }
    assert kernels.PROGRAM in kernels.__doc__ and step.PROGRAM in step.__doc__
