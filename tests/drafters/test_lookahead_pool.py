"""The n-gram pool keeps what was used last, within both its bounds; guesses become a tree with shared prefixes."""

import random

import pytest

from betoken.drafters.lookahead.pool import NgramPool, merge_guesses


def test_guesses_come_most_recently_used_first():
    pool = NgramPool(max_guesses=3)
    pool.add([(1, 2, 3), (1, 4, 5), (2, 9, 9), (1, 2, 3)])
    assert pool.guesses(1) == [(2, 3), (4, 5)]
    assert pool.guesses(2) == [(9, 9)]
    assert pool.guesses(3) == []
    assert len(pool) == 3


def test_the_pool_keeps_the_last_used_guesses_of_a_first_token():
    pool = NgramPool(max_guesses=2)
    pool.add([(1, 2), (1, 3), (1, 2), (1, 4)])
    assert pool.guesses(1) == [(4,), (2,)]


def test_the_pool_drops_the_least_recently_used_guesses():
    pool = NgramPool(max_guesses=2, max_ngrams=3)
    pool.add([(1, 2), (2, 3), (3, 4), (1, 2), (4, 5)])
    assert pool.guesses(2) == []
    assert [pool.guesses(token_id) for token_id in (1, 3, 4)] == [[(2,)], [(4,)], [(5,)]]


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_equals_a_list_of_all_guesses_in_order_of_use(seed):
    rng = random.Random(seed)
    max_guesses, max_ngrams, size = rng.randrange(1, 5), rng.randrange(1, 12), rng.randrange(2, 5)
    pool = NgramPool(max_guesses, max_ngrams)
    used: list[tuple[int, ...]] = []
    for _ in range(200):
        ngram = tuple(rng.randrange(3) for _ in range(size))
        pool.add([ngram])
        used = [other for other in used if other != ngram] + [ngram]
        same_key = [other for other in used if other[0] == ngram[0]]
        if len(same_key) > max_guesses:
            used.remove(same_key[0])
        used = used[-max_ngrams:]
        assert len(pool) == len(used)
        for first in range(3):
            assert pool.guesses(first) == [other[1:] for other in reversed(used) if other[0] == first]


def test_guesses_share_their_prefixes_in_a_tree():
    ids, parents = merge_guesses([(5, 6, 7), (5, 6, 8), (5, 9, 9), (4, 6, 7)], num_nodes=20)
    assert ids == [5, 6, 7, 8, 9, 9, 4, 6, 7]
    assert parents == [-1, 0, 1, 1, 0, 4, -1, 6, 7]


@pytest.mark.parametrize("num_nodes", range(10))
def test_a_tree_is_cut_to_its_first_nodes(num_nodes):
    guesses = [(5, 6, 7), (5, 6, 8), (5, 9, 9), (4, 6, 7)]
    whole = merge_guesses(guesses, 20)
    assert merge_guesses(guesses, num_nodes) == (whole[0][:num_nodes], whole[1][:num_nodes])


def test_no_guesses_are_no_nodes():
    assert merge_guesses([], 4) == ([], [])
