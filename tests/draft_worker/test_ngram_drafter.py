"""The n-gram index finds what a literal search finds."""

import random

import pytest

from foretoken.draft_worker.ngram_drafter import NgramIndex


def literal_search(ids, min_ngram, max_ngram):
    """Longest suffix first, most recent earlier occurrence with a token after it."""
    for n in range(min(max_ngram, len(ids)), min_ngram - 1, -1):
        for start in range(len(ids) - n - 1, -1, -1):
            if ids[start : start + n] == ids[-n:]:
                return start + n
    return None


@pytest.mark.parametrize(("min_ngram", "max_ngram"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_the_index_equals_a_literal_search_at_every_length(min_ngram, max_ngram):
    rng = random.Random(max_ngram)
    ids = []
    index = NgramIndex(min_ngram, max_ngram)
    num_found = 0
    for _ in range(400):
        ids += [rng.randrange(5) for _ in range(rng.randrange(1, 4))]
        index.extend(ids)
        assert index.find(ids) == literal_search(ids, min_ngram, max_ngram)
        num_found += index.find(ids) is not None
    assert num_found > 100


def test_a_token_never_matches_itself():
    index = NgramIndex(1, 2)
    index.extend([1, 2, 3])
    assert index.find([1, 2, 3]) is None
