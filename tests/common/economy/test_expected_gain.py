"""The expected gain of drafting follows from realised accepts, the costs of a round and the number of sequences."""

import math

import pytest

from betoken.common.economy.expected_gain import ExpectedGain


def learnt(num_tokens: int, num_rows: int, waiting_s: float) -> ExpectedGain:
    """Drafts without forwards, like n-grams."""
    gain = ExpectedGain()
    for _ in range(2000):
        gain.add_draft(num_rows - 1, 0, waiting_s, 0.0, 0)
        gain.add(num_tokens, num_rows, waiting_s, 0)
    return gain


def learnt_of_model(acceptance: float, draft_s: float) -> ExpectedGain:
    gain = ExpectedGain()
    for index in range(2000):
        gain.add_draft(1, 1, draft_s, draft_s, 0)
        gain.lengths.acceptance.add(1, int(index % 100 < 100 * acceptance))
    return gain


def test_the_gain_is_tokens_by_time_over_that_of_decode_steps() -> None:
    gain = learnt(4, 6, 0.001)
    for num_running in (1, 4, 16):
        drafted_s = 0.003 + num_running * 5 * 0.0001 + 0.001
        expected = math.log(4 / drafted_s * 0.003)
        assert gain.gain(num_running, 0.003, 0.0001, 0) == pytest.approx(expected, abs=1e-3)


def test_at_a_high_token_price_drafts_pay_off_for_few_sequences_only() -> None:
    gain = learnt(3, 6, 0.0)
    assert gain.gain(1, 0.001, 0.0001, 0) > 0 > gain.gain(16, 0.003, 0.0001, 4)


def test_a_new_drafter_has_an_expected_gain_and_an_expected_draft_time() -> None:
    assert ExpectedGain().gain(1, 0.001, 0.00005, 0) > 0
    assert ExpectedGain().gain(1, 0.001, 0.0002, 0) < ExpectedGain().gain(1, 0.001, 0.00005, 0)


def test_useless_drafts_have_an_expected_loss() -> None:
    assert learnt(1, 6, 0.001).gain(1, 0.001, 0.0001, 0) < 0


def test_a_models_gain_is_that_of_its_best_length() -> None:
    """Forwards of 1.5B and 0.5B models: five draft tokens lose, two win."""
    gain = learnt_of_model(0.7, 0.036).gain(1, 0.109, 0.016, 0)
    assert gain == pytest.approx(math.log((1 + 0.7 + 0.49) * 0.109 / (0.109 + 2 * 0.052)), abs=0.04)
    assert learnt_of_model(0.3, 0.036).gain(1, 0.109, 0.016, 0) < 0


@pytest.mark.parametrize("lengths", [(8,), (1, 12), (2, 5, 8)])
def test_a_parallel_draft_costs_one_forward_whatever_its_length(lengths: tuple[int, ...]) -> None:
    gain = ExpectedGain()
    for index in range(200):
        gain.add_draft(lengths[index % len(lengths)], 1, 0.04, 0.036, 0)
    time = gain.round_time(0.1, 0.01, 0)
    assert (time.draft_s, time.request_s) == (pytest.approx(0, abs=1e-9), pytest.approx(0.04))


@pytest.mark.parametrize("lengths", [(8,), (1, 12), (2, 5, 8)])
def test_a_draft_of_one_forward_per_token_costs_its_length(lengths: tuple[int, ...]) -> None:
    gain = ExpectedGain()
    for index in range(200):
        length = lengths[index % len(lengths)]
        gain.add_draft(length, length, 0.036 * length + 0.004, 0.036 * length, 0)
    time = gain.round_time(0.1, 0.01, 0)
    assert (time.draft_s, time.request_s) == (pytest.approx(0.036), pytest.approx(0.004))


def test_waiting_under_load_does_not_change_the_expected_gain_of_a_lone_sequence() -> None:
    gain = learnt(4, 6, 0.0)
    for _ in range(2000):
        gain.add_draft(5, 0, 0.02, 0.0, 4)
        gain.add(4, 6, 0.02, 4)
    assert gain.gain(16, 0.003, 0.0001, 4) < 0 < gain.gain(1, 0.001, 0.0001, 0)


def test_evidence_moves_to_the_prior_while_no_drafts_are_made() -> None:
    gain, prior = learnt(1, 6, 0.0), ExpectedGain()
    for _ in range(20):
        gain.relax(0.5)
    assert gain._tokens.mean == pytest.approx(prior._tokens.mean, rel=0.01)
    assert gain.lengths.acceptance.mean == pytest.approx(prior.lengths.acceptance.mean, rel=0.01)


def overlapped(hit_rate: float) -> ExpectedGain:
    """Forwards of 1.5B and 0.5B models; drafts that were made ahead come at once."""
    gain = ExpectedGain()
    for index in range(2000):
        num_tokens, is_hit = 1 + index % 3, index % 10 < 10 * hit_rate
        seconds = 0.0 if is_hit else 0.036 * num_tokens
        gain.add_draft(num_tokens, num_tokens, seconds, seconds, 0, is_hit=is_hit)
        gain.lengths.acceptance.add(1, int(index % 10 < 7))
    return gain


def test_drafts_made_ahead_do_not_shorten_the_expected_time_of_drafting() -> None:
    time = overlapped(0.5).round_time(0.109, 0.016, 0)
    assert time.draft_s == pytest.approx(0.036, rel=0.05) and time.hit_rate == pytest.approx(0.5, abs=0.2)


def test_the_expected_gain_of_overlapped_rounds_is_higher_than_of_synchronous_ones() -> None:
    gains = [overlapped(hit_rate).gain(1, 0.109, 0.016, 0) for hit_rate in (0.0, 0.5, 0.9)]
    assert gains == sorted(gains) and gains[2] > gains[0] + 0.1


def test_the_hit_rate_falls_when_rounds_are_no_longer_overlapped() -> None:
    gain = overlapped(1.0)
    for _ in range(200):
        gain.add_draft(1, 1, 0.036, 0.036, 0)
    assert gain.round_time(0.109, 0.016, 0).hit_rate < 0.01


@pytest.mark.parametrize("num_running", [1, 2, 8])
def test_the_loss_of_a_trial_is_that_of_all_sequences(num_running: int) -> None:
    """A round of one drafting sequence: 2.5 tokens, five draft tokens of 1 ms, 2 ms of waiting; a step takes 10 ms."""
    loss = learnt(2.5, 6, 0.002).trial_loss(num_running, 0.01, 0.001, 0)
    assert loss == pytest.approx((num_running * 0.7 - 1.5) / 2.5, abs=0.02)
