"""The benchmark of quantised products: its report, and its refusal to print speeds of a wrong product."""

import json

import pytest
import torch

from betoken.bench import cpu_products
from betoken.kernels.cpu import load_cpu_kernels

SMALL = ["--types", "Q4_K", "Q5_0", "--rows", "1", "3", "--rounds", "1", "--threads", "1"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    if load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernels cannot be built here")
    monkeypatch.setattr(cpu_products, "SHAPES", ((64, 512), (32, 1024)))


def test_quantised_products_are_compared_and_reported(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert cpu_products.main(SMALL) == 0
    finally:
        torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [result["type"] for result in report["products"]] == ["Q4_K", "Q5_0"]
    assert all(set(result["ms"]) == {"exact", "int8"} for result in report["products"])


def test_no_speed_is_printed_of_a_wrong_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_products, "rounded", lambda x: x * 1.01)
    threads = torch.get_num_threads()
    try:
        assert cpu_products.main(SMALL) == 1
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr().out
    assert "int8 Q4_K is not its reference" in output and "GB/s" not in output
