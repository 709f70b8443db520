"""The gate before the clock: a wrong, unwritten or untaken Triton path is found, and then no speed is given."""

import json
from collections.abc import Callable

import pytest
import torch

from betoken.bench import kernels
from betoken.bench.gpu.case import Case, Side, find_fault, measure
from betoken.kernels import dispatch


class FakeTimer:
    """Every call takes two milliseconds, a copy moves a gigabyte in a second."""

    def time_ms(self, call: Callable[[], object], is_recordable: bool = True) -> float:
        call()
        return 2.0

    def copy_bytes_per_s(self) -> float:
        return 1e9


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def written(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x).mul_(2)


def half_written(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[::2] = x[::2] * 2
    return out


def wrong(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + (x > 0.99)


def make(triton: Callable[..., torch.Tensor], tolerance: float = 0.0, others: tuple[Side, ...] = ()) -> Case:
    """A case whose op has this Triton path."""

    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        _, implementation = dispatch.select(x.device, {"reference": doubled, "triton": triton})
        return (implementation(x),)

    return Case("double", "R=1000", 4_000_000, lambda: (torch.rand(1000),), run, tolerance, others)


def test_a_right_kernel_path_passes() -> None:
    assert find_fault(make(written)) is None
    assert find_fault(make(lambda x: x * 2 + 1e-7, tolerance=1e-6)) is None


@pytest.mark.parametrize("tolerance", [0.0, 1e-3])
@pytest.mark.parametrize("triton", [half_written, wrong, lambda x: x[:5], lambda x: x.double()])
def test_a_wrong_kernel_path_is_found(triton: Callable[..., torch.Tensor], tolerance: float) -> None:
    assert "output 0" in (find_fault(make(triton, tolerance)) or "")


def test_the_reference_in_place_of_a_kernel_is_found() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        _, implementation = dispatch.select(x.device, {"reference": doubled})
        return (implementation(x),)

    assert find_fault(Case("double", "", 1, lambda: (torch.rand(9),), run)) == "the paths taken were reference"


def test_changes_in_place_of_one_path_do_not_reach_the_other() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor]:
        _, implementation = dispatch.select(x.device, {"reference": torch.Tensor.mul_, "triton": torch.Tensor.mul_})
        implementation(x, 2)
        return (x,)

    assert find_fault(Case("double", "", 1, lambda: (torch.rand(9),), run)) is None


def test_a_fraction_is_the_floor_over_the_time_and_a_failing_other_is_an_entry() -> None:
    def fail(x: torch.Tensor) -> None:
        raise RuntimeError("no such kernel")

    case = make(doubled, others=(Side("torch", doubled), Side("another", fail)))
    result = measure(case, FakeTimer(), 1e9)
    assert result["floor_ms"] == 4.0
    assert result["sides"]["betoken"] == {"ms": 2.0, "fraction_of_floor": 2.0} == result["sides"]["torch"]
    assert result["sides"]["another"] == {"failed": "RuntimeError: no such kernel"}


def test_speeds_are_refused_when_one_case_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    result = kernels.report([make(written), make(half_written)], FakeTimer())
    kernels.print_report(result)
    printed = capsys.readouterr().out
    assert "500 of 1000 entries differ" in printed and "no speeds" in printed and " ms" not in printed
    assert "cases" not in result and "ms" not in json.dumps(result)


def test_speeds_are_printed_when_all_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    result = kernels.report([make(written)], FakeTimer())
    kernels.print_report(result)
    assert "2.0000 ms" in capsys.readouterr().out and result["faults"] == []
