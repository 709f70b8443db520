"""An alignment is the longest common diagonal of two encodings."""

import random

import pytest

from betoken.drafters.translated.alignment import Alignment, align


def longest_diagonals(old, new):
    """All longest runs of equal ids by the definition: (end in old, end in new), and their length."""
    runs = [
        ((start + length, other + length), length)
        for start in range(len(old))
        for other in range(len(new))
        for length in range(1, min(len(old) - start, len(new) - other) + 1)
        if old[start : start + length] == new[other : other + length]
    ]
    longest = max((length for _, length in runs), default=0)
    return [ends for ends, length in runs if length == longest], longest


@pytest.mark.parametrize("seed", range(8))
def test_an_alignment_follows_a_longest_common_diagonal(seed):
    rng = random.Random(seed)
    for _ in range(100):
        old, new = ([rng.randrange(4) for _ in range(rng.randrange(9))] for _ in range(2))
        ends, longest = longest_diagonals(old, new)
        found = align(old, new)
        assert (found is None) == (longest == 0)
        if found is not None:
            assert (len(old) - found.num_replaced, len(new) - len(found.tail)) in ends
            assert found.num_replaced == min(len(old) - end for end, _ in ends)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], Alignment(0, [4, 5])),
        ([1, 2, 3], [1, 2, 9], Alignment(1, [9])),
        ([1, 2, 3], [8, 2, 3, 4], Alignment(0, [4])),
        ([7, 7, 7], [7, 7, 7, 7], Alignment(0, [7])),
        ([1, 2], [1], Alignment(1, [])),
        ([1, 2], [3, 4], None),
        ([], [3], None),
    ],
)
def test_an_alignment_replaces_the_differing_tail(old, new, expected):
    assert align(old, new) == expected
