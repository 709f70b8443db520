"""Means by confidence, which begin as what a prior knows."""

import pytest

from betoken.common.economy.means import DecayedMean, RoundMeans


def test_a_decayed_mean_weighs_the_past_less():
    mean = DecayedMean(0.5)
    assert mean.mean == 0
    for value in (4, 1):
        mean.add(value)
    assert mean.mean == pytest.approx((0.5 * 4 + 1) / 1.5)


def test_confidences_are_kept_apart_and_an_unknown_one_counts_as_all():
    tokens = RoundMeans(0.9)
    assert tokens.mean(0) == 0
    tokens.add(0, 1)
    tokens.add(3, 5)
    assert (tokens.mean(0), tokens.mean(3)) == (1, 5)
    assert tokens.mean(7) == pytest.approx((0.9 * 1 + 5) / 1.9)


def test_a_prior_counts_as_so_many_rounds_once_it_knows_something():
    common = RoundMeans(0.9)
    tokens = RoundMeans(1.0, common, prior_rounds=3)
    assert tokens.mean(1) == 0
    common.add(1, 4)
    assert tokens.mean(2) == 4, "nothing on it anywhere: as all of them"
    tokens.add(1, 8)
    assert tokens.mean(1) == pytest.approx((3 * 4 + 8) / 4)
    assert common.mean(1) == 4
