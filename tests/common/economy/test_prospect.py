"""The expected gain of drafting follows from its rounds, the token price and the number of sequences."""

import math

import pytest

from betoken.common.economy.prospect import Prospect


def learnt(num_tokens: int, num_rows: int, waiting_s: float) -> Prospect:
    prospect = Prospect()
    for _ in range(2000):
        prospect.add(num_tokens, num_rows, waiting_s, size=0)
    return prospect


def test_the_gain_is_tokens_by_time_over_that_of_plain_steps():
    prospect = learnt(4, 6, 0.001)
    for num_running in (1, 4, 16):
        drafted_s = 0.003 + num_running * 5 * 0.0001 + 0.001
        expected = math.log(4 / drafted_s * 0.003)
        assert prospect.gain(num_running, 0.003, 0.0001, size=0) == pytest.approx(expected, abs=1e-3)


def test_at_a_high_token_price_drafts_pay_off_for_few_sequences_only():
    prospect = learnt(3, 6, 0.0)
    assert prospect.gain(1, 0.001, 0.0001, size=0) > 0 > prospect.gain(16, 0.003, 0.0001, size=4)


def test_a_new_drafter_has_an_expected_gain():
    assert Prospect().gain(1, 0.001, 0.00005, size=0) > 0


def test_useless_drafts_have_an_expected_loss():
    assert learnt(1, 6, 0.001).gain(1, 0.001, 0.0001, size=0) < 0


def test_waiting_under_load_does_not_change_the_expected_gain_of_a_lone_sequence():
    prospect = learnt(4, 6, 0.0)
    for _ in range(2000):
        prospect.add(4, 6, 0.02, size=4)
    assert prospect.gain(16, 0.003, 0.0001, size=4) < 0 < prospect.gain(1, 0.001, 0.0001, size=0)
