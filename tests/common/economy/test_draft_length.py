"""Draft lengths by price, on recorded step times and without a clock."""

import itertools
import random
from dataclasses import replace

import pytest

from betoken.common.economy.draft_length import LADDER, DraftLengths, PositionAcceptance, RoundTime, draft_lengths

CODER = RoundTime(decode_s=0.109, token_s=0.0162, draft_s=0.0363)
"""Recorded forwards of Qwen2.5-Coder 1.5B with 0.5B on two cores: 109 and 190 ms for 1 and 6 tokens."""


def powers(acceptance: float, num_tokens: int = 16) -> list[float]:
    return [acceptance**position for position in range(1, num_tokens + 1)]


def rate(survivals: list[list[float]], lengths: list[int], time: RoundTime) -> float:
    tokens = sum(1 + sum(survival[:length]) for survival, length in zip(survivals, lengths, strict=True))
    return tokens / time.seconds(sum(lengths), max(lengths))


@pytest.mark.parametrize(("acceptance", "length"), [(0.3, 0), (0.5, 1), (0.7, 1), (0.9, 3)])
def test_the_draft_length_on_recorded_costs_grows_with_acceptance(acceptance: float, length: int) -> None:
    assert draft_lengths([powers(acceptance)], CODER) == [length]


def test_draft_lengths_are_the_best_of_all_combinations() -> None:
    generator = random.Random(1)
    for _ in range(30):
        survivals = [powers(generator.uniform(0.1, 0.95), 4) for _ in range(3)]
        time = RoundTime(0.1, generator.uniform(0.005, 0.05), 0.0, generator.uniform(0.0, 0.05))
        best = max(itertools.product(range(5), repeat=3), key=lambda lengths: rate(survivals, list(lengths), time))
        assert rate(survivals, draft_lengths(survivals, time), time) == pytest.approx(rate(survivals, list(best), time))


def test_likely_sequences_of_a_batch_get_the_positions() -> None:
    time = RoundTime(decode_s=0.1, token_s=0.03, draft_s=0.002)
    good, bad = draft_lengths([powers(0.9), powers(0.2)], time)
    assert good > 2 and bad == 0


def test_many_sequences_draft_less_than_one() -> None:
    time = [RoundTime(0.109 + n * 0.0162, 0.0162, 0.0363 * (1 + n / 8)) for n in (1, 4, 16, 64)]
    lengths = [draft_lengths([powers(0.7)] * n, time[i])[0] for i, n in enumerate((1, 4, 16, 64))]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("hit_rate", "length"), [(0.0, 1), (0.25, 2), (0.8, 3), (1.0, 3)])
def test_the_draft_length_on_recorded_costs_grows_with_the_hit_rate_of_overlapped_rounds(
    hit_rate: float, length: int
) -> None:
    assert draft_lengths([powers(0.7)], replace(CODER, hit_rate=hit_rate)) == [length]


def test_an_overlapped_round_takes_the_longer_of_verification_and_draft_on_a_hit_and_their_sum_on_a_miss() -> None:
    miss_s, hit_s = (replace(CODER, request_s=0.002, hit_rate=rate).seconds(3, 3) for rate in (1e-12, 1.0))
    verify_s = 0.109 + 3 * 0.0162
    assert miss_s == pytest.approx(verify_s + 3 * 0.0363 + 0.002)
    assert hit_s == pytest.approx(max(verify_s, 4 * 0.0363))
    assert replace(CODER, draft_s=0.1, hit_rate=1.0).seconds(3, 3) == pytest.approx(0.4)
    assert replace(CODER, hit_rate=1.0).seconds(0, 0) == 0.109


def test_position_acceptance_counts_the_first_rejected_token_and_none_after_it() -> None:
    acceptance = PositionAcceptance()
    for _ in range(3000):
        acceptance.add(4, 1)
    assert acceptance.survival(3)[0] == pytest.approx(0.99)
    assert acceptance.survival(3)[1] == pytest.approx(0.0, abs=0.05)


def test_a_sequence_moves_along_the_ladder_one_step_at_a_time() -> None:
    lengths = DraftLengths()
    sequence = lengths.open()
    seen = [sequence.next(CODER, 16)]
    for _ in range(60):
        sequence.add(seen[-1], seen[-1])
        seen.append(sequence.next(CODER, 16))
    rungs = [LADDER.index(length) for length in seen]
    assert max(abs(after - before) for before, after in itertools.pairwise(rungs)) == 1
    assert seen[-1] > seen[0]


def test_a_sequence_whose_drafts_fail_pauses_and_drafts_again() -> None:
    lengths = DraftLengths()
    good, bad = lengths.open(), lengths.open()
    for _ in range(300):
        if length := bad.next(CODER, 16):
            bad.add(length, 0)
        good.add(3, 3)
        if bad.is_paused:
            break
    assert bad.is_paused
    bad.add_tokens(1000)
    assert not bad.is_paused and bad.next(CODER, 16) == 1


def test_short_answers_of_a_model_that_was_wrong_are_drafted_for_again() -> None:
    """Each is shorter than the pause of a sequence without drafts."""
    lengths = DraftLengths()
    wrong = lengths.open()
    for _ in range(400):
        wrong.add(2, 0)
    wrong.close()
    num_tokens = 0
    while num_tokens < 20_000:
        answer = lengths.open()
        if answer.next(RoundTime(0.010, 0.001, 0.002), 16):
            break
        answer.add_tokens(16)
        num_tokens += 16
        answer.close()
    assert 2_000 < num_tokens < 20_000
