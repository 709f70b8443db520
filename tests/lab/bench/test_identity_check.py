"""The near-tie rule and the count: what is identical, what is excused, what fails."""

import pytest

from betoken.bench.identity_check import Comparison, IdentityCount, Outcome, compare_ids
from betoken.bench.near_tie import first_difference, is_near_tie, max_near_ties
from betoken.bench.prompts import Prompt

PROMPT = Prompt(3, "text")


@pytest.mark.parametrize(
    ("ids", "reference_ids", "position"),
    [([1, 2], [1, 2], None), ([], [], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [], 0)],
)
def test_the_first_difference_of_two_answers_is_found(
    ids: list[int], reference_ids: list[int], position: int | None
) -> None:
    assert first_difference(ids, reference_ids) == position


def test_a_near_tie_needs_both_gaps_below_the_bound() -> None:
    assert is_near_tie(9e-5, 0.0)
    assert not is_near_tie(1e-4, 0.0)
    assert not is_near_tie(0.0, 1e-4)


def test_two_of_164_are_excusable_and_three_fail() -> None:
    assert max_near_ties(164) == 2
    count = IdentityCount()
    for _ in range(162):
        count.add(Comparison(Outcome.IDENTICAL), with_transformers=True)
    for expected in (True, True, False):
        count.add(Comparison(Outcome.NEAR_TIE, "tie"), with_transformers=True)
        assert count.holds is expected


def test_one_difference_fails_and_says_where() -> None:
    count = IdentityCount()
    count.add(compare_ids(PROMPT, (1, 2, 3), (1, 2, 3)))
    assert count.holds
    count.add(compare_ids(PROMPT, (1, 2), (1, 2, 3)))
    assert (count.compared, count.identical, count.failed, count.holds) == (2, 1, 1, False)
    assert count.differences == ["prompt 3: differs at output position 2: the end instead of 3"]
