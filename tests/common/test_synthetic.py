"""Arithmetic of synthetic workers: tokens, draws, and tables of step times."""

import pytest

from betoken.common.synthetic import NUM_IDS, SimulatedTimes, is_drawn, next_id, other_id, probabilities, probability


@pytest.mark.parametrize(("num_tokens", "ms"), [(1, 20), (8, 22), (9, 24), (10, 26), (64, 26)])
def test_step_times_are_interpolated_within_the_table(num_tokens: int, ms: float) -> None:
    assert SimulatedTimes.parse("8:22,10:26").seconds(8) == pytest.approx(0.022)
    assert SimulatedTimes.parse("1:20,8:22,10:26").seconds(num_tokens) == pytest.approx(ms / 1e3)


def test_a_single_step_time_holds_for_all_numbers_of_tokens() -> None:
    assert {SimulatedTimes.parse("2.5").seconds(num_tokens) for num_tokens in (1, 7, 300)} == {0.0025}


@pytest.mark.parametrize("text", ["", "a", "1:2,3", "2:1,1:2", "0:1,2:3", "-1", "nan", "inf", "70000", "1:2:3"])
def test_bad_step_times_are_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        SimulatedTimes.parse(text)


def test_synthetic_tokens_are_never_end_ids() -> None:
    end_ids = set(range(0, NUM_IDS, 2))
    for position in range(200):
        token_id = next_id(position, 5, end_ids)
        assert token_id not in end_ids and token_id < NUM_IDS
        assert other_id(token_id, end_ids) not in {*end_ids, token_id}


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
def test_draws_have_their_probability(chance: float) -> None:
    share = sum(is_drawn(chance, seed, position) for seed in range(40) for position in range(250)) / 10_000
    assert share == pytest.approx(chance, abs=0.015)


def test_probabilities_are_checked() -> None:
    assert probabilities("0.9,0.5") == (0.9, 0.5) and probability("1") == 1.0
    for text in ("", "1.1", "-0.1", "nan", "x", "0.5,,"):
        with pytest.raises(ValueError):
            probabilities(text)
    with pytest.raises(ValueError, match="one number"):
        probability("0.1,0.2")
