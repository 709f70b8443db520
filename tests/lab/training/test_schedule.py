import pytest

from betoken.training.schedule import DECAY_FROM, WARMUP_FRACTION, Budget, learning_rate_scale, window_tokens

FRACTIONS = [index / 1000 for index in range(1000)]


def test_the_learning_rate_rises_stays_and_falls_to_zero() -> None:
    rates = [learning_rate_scale(fraction) for fraction in FRACTIONS]
    assert all(0 < rate <= 1 for rate in rates)
    steps = list(zip(FRACTIONS[:-1], rates[:-1], rates[1:], strict=True))
    assert all(later > rate for fraction, rate, later in steps if fraction < WARMUP_FRACTION - 1e-3)
    assert all(later == rate == 1 for fraction, rate, later in steps if WARMUP_FRACTION <= fraction < DECAY_FROM - 1e-3)
    assert all(later < rate for fraction, rate, later in steps if fraction >= DECAY_FROM)
    assert learning_rate_scale(1.0) == 0


def test_windows_are_short_for_eighty_percent() -> None:
    assert sum(window_tokens(fraction, 256, 1024, 0.8) == 256 for fraction in FRACTIONS) == 800
    assert window_tokens(0.0, 256, 1024, 0.8) == 256 and window_tokens(0.999, 256, 1024, 0.8) == 1024


def test_a_budget_counts_tokens_or_minutes() -> None:
    assert Budget(tokens=100).fraction(25, elapsed_s=1e9) == 0.25
    assert Budget(minutes=2).fraction(10**9, elapsed_s=30) == 0.25
    assert Budget(tokens=100).fraction(150, 0.0) == 1


@pytest.mark.parametrize("limits", [{}, {"tokens": 1, "minutes": 1.0}, {"tokens": 0}, {"minutes": -1.0}])
def test_an_invalid_training_budget_is_rejected(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(**limits)  # type: ignore[arg-type]
