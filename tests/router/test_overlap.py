"""Overlapped rounds in the router: when drafters are to draft ahead, and what their counts may be."""

import pytest

from betoken.router.workers.draft import usable_draft
from betoken.v1.draft_pb2 import DraftedBlock
from tests.router.conftest import MakeCluster


async def outcomes_requested(make_cluster: MakeCluster, **settings) -> list[int]:
    """`num_outcomes` of the draft requests of one answer."""
    cluster = await make_cluster(**settings)
    drafter = cluster.drafters[0]
    drafter.requests = []
    await cluster.generate(max_new_tokens=30, ignore_eos=True, num_draft_tokens=4)
    assert drafter.requests
    return [request.num_outcomes for request in drafter.requests]


async def test_a_drafter_is_to_draft_ahead_while_another_draft_may_follow(make_cluster: MakeCluster) -> None:
    first, *_, last = await outcomes_requested(make_cluster, overlap="on", overlap_outcomes=5)
    assert (first, last) == (5, 0)


async def test_rounds_are_not_overlapped_by_default(make_cluster: MakeCluster) -> None:
    assert not any(await outcomes_requested(make_cluster))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, 0)),
        ({"num_ahead_tokens": 9}, (None, 0)),
        ({"num_ahead_ids": 0, "num_ahead_tokens": 9}, (0, 9)),
        ({"num_ahead_ids": 7, "num_ahead_tokens": 9}, (3, 9)),
        ({"num_ahead_ids": 3, "num_ahead_tokens": 2}, (2, 2)),
    ],
)
def test_counts_of_tokens_drafted_ahead_are_bounded_by_the_draft(fields: dict[str, int], expected: tuple) -> None:
    draft = usable_draft(DraftedBlock(ids=[1, 2, 3], **fields), 8, 50, takes_trees=False, elapsed_ns=0)
    assert (draft.num_ahead_ids, draft.num_ahead_tokens) == expected
