"""A pass costs what is emitted while it runs."""

import pytest

from betoken.drafters.side.pass_price import PassPrice


def test_a_draft_forward_costs_the_tokens_of_its_time():
    price = PassPrice()
    for round_number in range(50):
        price.begin_round(round_number * 1000)
        price.add_tokens(2)
        price.add_pass(100)
    assert price.price == pytest.approx(0.2)


def test_without_rounds_a_draft_forward_costs_nothing():
    price = PassPrice()
    price.add_pass(100)
    price.begin_round(5)
    assert price.price == 0.0


def test_pauses_are_not_rounds_in_the_price_of_a_draft_forward():
    price = PassPrice()
    price.add_pass(100)
    price.begin_round(0)
    price.begin_round(10**12)
    price.add_tokens(1)
    price.begin_round(10**12 + 1000)
    assert price.price == pytest.approx(0.1)
