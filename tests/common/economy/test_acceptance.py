"""A drafter's probabilities are corrected until they match observed frequencies."""

import random

import pytest

from betoken.common.economy.acceptance import Calibration


@pytest.mark.parametrize(("claimed", "true"), [(0.9, 0.5), (0.5, 0.9), (0.7, 0.7)])
def test_claimed_probabilities_become_observed_frequencies(claimed, true):
    rng, calibration = random.Random(1), Calibration()
    for _ in range(4000):
        calibration.learn([7], [-1], [claimed], [7 if rng.random() < true else 8])
    assert calibration.score(claimed) == pytest.approx(true, abs=0.1)


def test_scores_and_probabilities_are_inverse_and_keep_their_order():
    calibration = Calibration()
    for _ in range(100):
        calibration.learn([7], [-1], [0.9], [8])
    assert calibration.exponent > 1
    scores = [calibration.score(share / 10) for share in range(11)]
    assert scores == sorted(scores) and scores[0] == 0 and scores[-1] == 1
    for share in (0.1, 0.5, 0.9):
        assert calibration.share(calibration.score(share)) == pytest.approx(share)


CHAIN = [-1, 0, 1]


class Noting(Calibration):
    def __init__(self):
        super().__init__()
        self.noted = []

    def observe(self, share, is_accepted):
        self.noted.append((round(share, 6), is_accepted))


@pytest.mark.parametrize(
    ("parents", "ids", "expected"),
    [
        (CHAIN, [1, 2, 9], [(0.8, True), (0.5, True), (0.5, False)]),
        (CHAIN, [1], [(0.8, True)]),
        (CHAIN, [9, 9, 9, 9], [(0.8, False)]),
        (CHAIN, [1, 2, 3, 4, 5], [(0.8, True), (0.5, True), (0.5, True)]),
        ([-1, -1, 1], [2, 3], [(0.8, False), (0.4, True), (0.5, True)]),
        ([-1, 0, -1], [1, 9], [(0.8, True), (0.5, False)]),
    ],
)
def test_a_token_counts_where_all_before_it_were_accepted(parents, ids, expected):
    calibration = Noting()
    calibration.learn([1, 2, 3], parents, [0.8, 0.4, 0.2], ids)
    assert calibration.noted == expected


def test_impossible_probabilities_are_left_alone():
    calibration = Calibration()
    calibration.learn([1, 2], [-1, 0], [0.0, 0.0], [1, 2])
    assert 0 < calibration.exponent < 10
