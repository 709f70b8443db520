"""Trees of guesses through the router: the text stays the same, and a result off the tree is not believed."""

from __future__ import annotations

import random

import pytest

from betoken.common.tree import is_path, num_sound
from betoken.router.workers.draft import usable_draft
from betoken.v1.draft_pb2 import DraftedBlock
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_RECOVERED,
)
from tests.router.harness import MakeCluster

PROMPT = [5, 6, 7]
OPTIONS = {"prompt_ids": PROMPT, "ignore_eos": True, "num_draft_tokens": 6}


@pytest.mark.parametrize("supports_trees", [False, True])
async def test_trees_give_the_same_tokens_and_go_where_they_are_taken(
    make_cluster: MakeCluster, supports_trees: bool
) -> None:
    cluster = await make_cluster(agreement=0.8, verify_hellos=[{"supports_trees": supports_trees}])
    cluster.drafters[0].makes_trees = True
    reply = await cluster.generate(**OPTIONS, max_new_tokens=90)
    assert reply.ids == cluster.target_ids(90, PROMPT)
    stats = reply.finish.speculation
    depth = 3 if supports_trees else 6
    assert len(stats.num_drafted_per_position) == depth
    assert stats.num_accepted_tokens > stats.num_drafts, "the wrong sibling comes first and must not hide the right one"
    origins = [token.origin for token in reply.tokens]
    assert origins.count(TOKEN_ORIGIN_ACCEPTED) == stats.num_accepted_tokens
    assert origins.count(TOKEN_ORIGIN_RECOVERED) + origins.count(TOKEN_ORIGIN_BONUS) == stats.num_drafts
    assert origins.count(TOKEN_ORIGIN_BONUS) and origins.count(TOKEN_ORIGIN_RECOVERED)
    accepted = [token.source for token in reply.tokens if token.origin == TOKEN_ORIGIN_ACCEPTED]
    assert set(accepted) == {"model"}, "the source is the accepted node's own"
    await cluster.until_idle()


async def test_an_invalid_tree_path_in_a_result_reopens_the_sequence(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(agreement=0.9, verify_hellos=[{"supports_trees": True}])
    cluster.drafters[0].makes_trees = True
    cluster.verifiers[0].faults.bad_path = 1
    reply = await cluster.generate(**OPTIONS, max_new_tokens=40)
    assert reply.ids == cluster.target_ids(40, PROMPT)
    assert cluster.verifiers[0].faults.bad_path == 0
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


def block(ids: list[int], parents: list[int], sources: list[str] | None = None) -> DraftedBlock:
    return DraftedBlock(ids=ids, parents=parents, sources=sources or ["ngram"] * len(ids))


@pytest.mark.parametrize(
    ("ids", "parents", "num_tokens", "takes_trees", "expected"),
    [
        ([1, 2, 3], [-1, -1, 0], 8, True, ([1, 2, 3], [-1, -1, 0])),
        ([1, 2, 3], [-1, -1, 0], 2, True, ([1, 2], [-1, -1])),
        ([1, 2, 3], [-1, -1, 0], 8, False, ([1], [])),
        ([1, 2, 3], [-1, 0, 1], 8, True, ([1, 2, 3], [])),
        ([1, 2, 3], [-1, 1, 0], 8, True, ([1], [])),
        ([1, 2, 3], [-1, -2, 0], 8, True, ([1], [])),
        ([1, 2, 3], [0, 0, 0], 8, True, ([], [])),
        ([1, 99, 3], [-1, -1, 0], 8, True, ([1], [])),
        ([1, 2, 99], [-1, -1, 0], 8, True, ([1, 2], [-1, -1])),
        ([1, 2, 3], [-1, -1], 8, True, ([1, 2], [-1, -1])),
        ([1, 2], [-1, 0, 1, 2], 8, True, ([1, 2], [])),
        ([1, 2, 3], [], 2, True, ([1, 2], [])),
    ],
)
def test_the_usable_part_of_a_draft_tree_is_used(ids, parents, num_tokens, takes_trees, expected) -> None:
    draft = usable_draft(block(ids, parents), num_tokens, 50, takes_trees, elapsed_ns=0)
    assert (list(draft.ids), list(draft.parents)) == expected
    assert len(draft.sources) == len(draft.ids)


def test_any_draft_block_becomes_a_valid_draft_tree() -> None:
    rng = random.Random(4)
    num_trees = 0
    for _ in range(2000):
        size = rng.randrange(0, 8)
        parents = [rng.randrange(-1, i) if rng.random() < 0.9 else rng.randrange(-3, 9) for i in range(size)]
        ids = [rng.randrange(52) for _ in range(size)]
        limit, takes_trees = rng.randrange(1, 9), rng.random() < 0.7
        draft = usable_draft(block(ids, parents), limit, 50, takes_trees, elapsed_ns=0)
        num_trees += bool(draft.parents)
        assert len(draft.ids) <= limit and all(token_id < 50 for token_id in draft.ids)
        assert list(draft.ids) == ids[: len(draft.ids)]
        assert not draft.parents or (takes_trees and len(draft.parents) == len(draft.ids))
        assert num_sound(draft.parents) == len(draft.parents)
        assert draft.depth <= len(draft.ids)
    assert num_trees > 200


def test_paths_of_a_draft_tree_and_their_continuations() -> None:
    draft = usable_draft(block([1, 2, 3, 4], [-1, 0, 0, 2]), 8, 50, True, elapsed_ns=0)
    assert draft.depth == 3
    assert [draft.is_exhausted_by(path) for path in ([], [0], [0, 1], [0, 2], [0, 2, 3])] == [
        False,
        False,
        True,
        False,
        True,
    ]
    assert all(is_path(path, draft.parents) for path in ([], [0], [0, 1], [0, 2, 3]))
    assert not any(is_path(path, draft.parents) for path in ([1], [0, 3], [0, 1, 2], [4], [-1]))
