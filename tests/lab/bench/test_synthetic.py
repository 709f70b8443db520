"""The benchmark of synthetic workers: measured speeds next to the formulas, and rejected options."""

import pytest

pytest.importorskip("torch")

from betoken.bench.synthetic import Cell, compared, main  # noqa: E402
from betoken.common.economy.plan import PlanInputs  # noqa: E402


def inputs(hit_rate: float) -> PlanInputs:
    return PlanInputs(target_step_ms=20, draft_step_ms=2, acceptance=0.8, rtt_ms=0.2, hit_rate=hit_rate)


@pytest.mark.parametrize(("is_overlapped", "round_time"), [(False, 1 + 0.4 + 0.02), (True, 0.01 + 0.5 + 0.5 * 1.41)])
def test_synthetic_speeds_that_equal_the_formula_have_a_ratio_of_one(is_overlapped: bool, round_time: float) -> None:
    block_length = (1 - 0.8**5) / 0.2
    plain = Cell(20, 1, 20, 0, 0, 0)
    drafted = Cell(20 * round_time / block_length, block_length, 20, 8, 0.4, 0.5)
    row = compared(plain, drafted, inputs(0.5), 4, is_overlapped)
    assert row["ratio"] == row["time_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert row["speedup"] == row["formula_of_measured_times"] == pytest.approx(block_length / round_time, abs=1e-3)


@pytest.mark.parametrize("arguments", [["--acceptance", "1.5"], ["--hit-rate", "x"], ["--num-draft-tokens", "0"]])
def test_options_of_the_synthetic_benchmark_are_checked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err
