"""The price of a row is what forwards really grow by, in tokens of the speed there really is."""

import random

import pytest

from betoken.common.economy.row_price import RowPrice
from betoken.engine.bring_up.step_costs import StepCost

TABLE = [StepCost(rows, 512, 1_000_000 + 50_000 * rows) for rows in (1, 2, 4, 8, 16, 32)]


def at_speed(price, tokens_per_s):
    price.resume(10.0)
    price.add_tokens(tokens_per_s, 11.0)
    return price


def test_without_forwards_the_price_of_a_row_is_zero():
    assert (RowPrice([]).price, RowPrice(TABLE).price, RowPrice(TABLE).tokens_per_s) == (0.0, 0.0, 0.0)
    price = at_speed(RowPrice([]), 1000)
    price.add_forward(4, 1, 2_000_000)
    assert price.price == 0.0


def test_equal_forwards_leave_the_table_of_step_times():
    price = at_speed(RowPrice(TABLE), 1000)
    for _ in range(50):
        price.add_forward(6, 1, 9_000_000)
    assert price.price == pytest.approx(50_000 * 1000 * 1e-9)


def test_only_the_longest_context_of_the_step_times_counts():
    price = at_speed(RowPrice([*TABLE, StepCost(1, 64, 1), StepCost(32, 64, 10_000_000)]), 1000)
    price.add_forward(6, 1, 9_000_000)
    assert price.price == pytest.approx(50_000 * 1000 * 1e-9)


def test_forwards_that_differ_say_what_a_row_costs_beside_what_a_sequence_costs():
    rng = random.Random(0)
    price = at_speed(RowPrice(TABLE), 2000)
    for _ in range(300):
        seqs = rng.randrange(1, 9)
        rows = seqs + sum(rng.randrange(9) for _ in range(seqs))
        price.add_forward(rows, seqs, int(1_000_000 + 400_000 * seqs + 120_000 * rows + rng.gauss(0, 100_000)))
    assert price.price == pytest.approx(120_000 * 2000 * 1e-9, rel=0.1)


def test_rows_that_cost_nothing_have_no_price():
    rng = random.Random(0)
    price = at_speed(RowPrice([StepCost(rows, 512, 5_000_000 - rows) for rows in (1, 32)]), 2000)
    for _ in range(300):
        price.add_forward(rng.randrange(1, 17), 1, 5_000_000)
    assert 0.0 <= price.price < 0.001


def test_time_without_sequences_does_not_slow_the_worker():
    price = at_speed(RowPrice(TABLE), 1000)
    assert price.tokens_per_s == pytest.approx(1000)
    price.resume(500.0)
    price.add_tokens(500, 500.5)
    assert price.tokens_per_s == pytest.approx(1000)
    for second in range(1, 20):
        price.add_tokens(100, 500.5 + second)
    assert price.tokens_per_s == pytest.approx(100, rel=0.01)


def test_a_table_slower_than_the_forwards_was_measured_on_a_busy_machine():
    price = at_speed(RowPrice([StepCost(cost.rows, 512, 7 * cost.ns) for cost in TABLE]), 1000)
    for _ in range(50):
        price.add_forward(1, 1, TABLE[0].ns)
    assert price.price == pytest.approx(50_000 * 1000 * 1e-9)


@pytest.mark.parametrize("growth_ns", [0, 1_500_000, -50_000])
def test_forwards_that_seldom_differ_correct_a_wrong_table(growth_ns):
    """One in twenty has three more rows: what is sure enough to be drafted at a wrong price."""
    rng = random.Random(0)
    price = at_speed(RowPrice([StepCost(rows, 512, 1_000_000 + growth_ns * rows) for rows in (1, 2, 4, 8)]), 1000)
    for index in range(1000):
        rows = 1 if index % 20 else 4
        price.add_forward(rows, 1, int((1_000_000 + 50_000 * rows) * rng.lognormvariate(0, 0.03)))
    assert price.price == pytest.approx(50_000 * 1000 * 1e-9, rel=0.3)


def test_step_times_of_a_busy_start_are_corrected_by_the_mean_of_forwards() -> None:
    price = RowPrice([StepCost(cost.rows, 512, 2 * cost.ns) for cost in TABLE])
    assert price.step_time_ratio == 0.0 and price.step_ns(4) == 2_400_000
    for _ in range(50):
        price.add_forward(4, 1, 1_200_000)
    assert price.step_time_ratio == pytest.approx(0.5)
    assert price.step_ns(4) == pytest.approx(1_200_000)
