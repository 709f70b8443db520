"""The interval of paired ratios: exact if possible, with the stated coverage, and its verdicts."""

import numpy as np
import pytest

from betoken.bench.paired_ratio import MIN_PAIRS, PairedRatio, Verdict, best_by_median, estimate


def test_equal_ratios_leave_no_doubt() -> None:
    found = estimate([0.9] * 20)
    assert (found.ratio, found.low, found.high) == pytest.approx((0.9, 0.9, 0.9))
    assert found.num_pairs == 20


def test_a_ratio_and_its_inverse_cancel() -> None:
    ratios = [0.5, 2.0, 0.8, 1.25]
    found = estimate(ratios)
    assert found.ratio == pytest.approx(1.0)
    assert found.low < 1.0 < found.high
    inverse = estimate([1 / ratio for ratio in ratios])
    assert (inverse.low, inverse.high) == pytest.approx((1 / found.high, 1 / found.low), rel=0.02)


def test_the_same_pairs_give_the_same_interval() -> None:
    assert estimate([0.9, 1.1, 1.0]) == estimate([0.9, 1.1, 1.0])


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """The percentile bootstrap of 20 pairs is known to be a little narrow."""
    generator = np.random.default_rng(3)
    num_trials = 300
    num_covered = 0
    for _ in range(num_trials):
        found = estimate(np.exp(generator.normal(np.log(0.93), 0.1, size=20)).tolist())
        num_covered += found.low <= 0.93 <= found.high
    assert 0.89 < num_covered / num_trials < 0.98


@pytest.mark.parametrize(
    ("low", "high", "num_pairs", "verdict"),
    [
        (0.95, 1.2, MIN_PAIRS, Verdict.WITHIN),
        (0.9499, 1.2, MIN_PAIRS, Verdict.UNDECIDED),
        (0.8, 0.95, MIN_PAIRS, Verdict.UNDECIDED),
        (0.8, 0.9499, MIN_PAIRS, Verdict.NOT_WITHIN),
        (0.99, 1.01, MIN_PAIRS - 1, Verdict.UNDECIDED),
        (0.8, 0.85, MIN_PAIRS - 1, Verdict.UNDECIDED),
    ],
)
def test_a_verdict_needs_the_whole_interval_and_enough_pairs(
    low: float, high: float, num_pairs: int, verdict: Verdict
) -> None:
    assert PairedRatio((low + high) / 2, low, high, num_pairs).verdict is verdict


def test_verdicts_read_as_the_report_prints_them() -> None:
    assert [str(verdict) for verdict in Verdict] == ["within 5 %", "not within 5 %", "undecided"]


def test_the_best_is_picked_by_its_median_not_by_its_luckiest_run() -> None:
    assert best_by_median({"steady": [5.0, 5.0, 5.0], "lucky": [4.0, 4.0, 99.0]}) == "steady"
    assert best_by_median({"first": [1.0], "second": [1.0]}) == "first"


@pytest.mark.parametrize("ratios", [[], [1.0, 0.0], [-1.0]])
def test_a_paired_ratio_of_values_without_a_logarithm_is_rejected(ratios: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        estimate(ratios)
