"""The choice among CPU kernels of the same bits: by times, without kernels that differ, kept for later starts."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from betoken.engine.bring_up import kernel_choice
from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.bring_up.kernel_choice import ROWS, choose_kernels, fastest
from betoken.engine.cpu.grouped_linear import pack_grouped_layers
from betoken.engine.weights.layers import GroupedLinear
from betoken.kernels.cpu import CpuKernels, load_cpu_kernels
from tests.kernels.grouped_weights import draw_weight


@pytest.mark.parametrize(
    ("times", "index"),
    [
        ([[10, 10, 10]], 0),
        ([[10, 10, 10], [9, 9, 9], [8, 8, 8]], 2),
        ([[10, 10, 10], [9.8, 9.8, 9.8]], 0),
        ([[10, 10, 10], [], [9, 9, 9]], 2),
        ([[10, 20, 10], [9, 18, 100]], 1),
        ([[10, 20, 40], [11, 22, 9]], 0),
    ],
    ids=["one", "least", "hardly faster", "unusable", "one bad round", "one good round"],
)
def test_the_fastest_candidate_is_clearly_faster_than_the_reference(times: list[list[float]], index: int) -> None:
    assert fastest(times) == index


def test_a_candidate_of_other_bits_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    results = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0000001])]
    with caplog.at_level(logging.WARNING):
        times = kernel_choice._compare(results.__getitem__, ["a", "b", "c"], "products")
    assert [bool(own) for own in times] == [True, True, False]
    assert [record.getMessage() for record in caplog.records] == ["c are not used: products differ from a"]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> CpuKernels:
    loaded = load_cpu_kernels()
    if loaded is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    loaded.load_grouped()
    loaded.load_int8()
    monkeypatch.setattr(kernel_choice, "MIN_WEIGHT_BYTES", 0)
    return loaded


@pytest.mark.parametrize("rounds_rows", [False, True], ids=["exact", "int8"])
def test_a_choice_changes_no_bit_and_is_kept(
    kernels: CpuKernels, rounds_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = GroupedLinear(draw_weight("int4", (96, 256), 32), None)
    layer.rounds_rows = rounds_rows
    model: Any = nn.Sequential(layer)
    model.dtype = torch.float32
    pack_grouped_layers(model, kernels)
    inputs = [torch.randn(num_rows, 256) for num_rows in ROWS]
    before: list[Tensor] = [model(x) for x in inputs]
    measured: list[str] = []
    measure = kernel_choice._measure

    def counted(weight: kernel_choice.MeasuredWeight, *rest: Any) -> list[str]:
        measured.append(weight.products)
        return measure(weight, *rest)

    monkeypatch.setattr(kernel_choice, "_measure", counted)
    for _ in range(2):
        choose_kernels(model, kernels, KeptResult(tmp_path, "cpu-kernels"))
        assert all(torch.equal(model(x), out) for x, out in zip(inputs, before, strict=True))
    assert measured == ["int8" if rounds_rows else "exact"]
    choose_kernels(model, kernels, None)
    assert len(measured) == 2
