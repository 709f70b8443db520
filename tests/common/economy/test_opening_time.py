"""A sequence is opened on a draft worker if its drafts save more time than its prefill takes."""

from betoken.common.economy.opening_time import OpeningTime
from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.step_times import ForwardTimes

TIMES = ForwardTimes(0.01, 0.1)


def policy(gain: float | None) -> SpeculationPolicy:
    made = SpeculationPolicy(lambda: 1)
    made.level(0).gain = gain
    made.add_opening(num_tokens=100, seconds=1.0)
    return made


def test_an_opening_takes_time_for_each_token_of_its_text() -> None:
    openings = OpeningTime()
    assert openings.seconds(300, level=0, target_token_s=0.01) == 0.75  # a quarter of the target's, as assumed
    openings.add(100, 1.0, level=0)
    assert openings.seconds(300, level=0, target_token_s=0.01) == 3.0
    assert openings.mean_s(level=0, target_token_s=0.01) == 1.0


def test_sequences_at_a_load_that_was_not_measured_are_opened_at_once() -> None:
    openings = OpeningTime()
    openings.add(100, 1.0, level=1)
    assert openings.seconds(100, level=3, target_token_s=0.01) == 4.0
    assert openings.seconds(100, level=0, target_token_s=0.01) == 1.0


def test_an_answer_too_short_for_its_opening_is_decoded_without_drafts() -> None:
    assert policy(0.1).pays_opening(100, 200, TIMES)  # saves 200 * 0.1 s * (1 - exp(-0.1)) = 1.9 s
    assert not policy(0.1).pays_opening(100, 64, TIMES)
    assert not policy(-0.1).pays_opening(100, 10_000, TIMES)


def test_an_opening_is_tried_while_the_gain_is_unknown() -> None:
    assert policy(None).pays_opening(100, 1, TIMES)


def test_one_slow_opening_is_not_final() -> None:
    made = policy(0.1)
    assert any(made.pays_opening(100, 64, TIMES) for _ in range(50))
