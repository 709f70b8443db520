"""Overlapped rounds in the router: when drafters are to draft ahead, and what their counts may be."""

import asyncio

import pytest

from betoken.router.workers.draft import Draft, usable_draft
from betoken.router.workers.draft_session import DraftFailedError, DraftSession
from betoken.router.workers.mailbox import Patience
from betoken.v1.draft_pb2 import Commit, DraftedBlock, DraftRequest
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


async def test_rounds_are_not_overlapped_before_a_gain_was_measured(make_cluster: MakeCluster) -> None:
    assert not any(await outcomes_requested(make_cluster))
    assert not any(await outcomes_requested(make_cluster, overlap="off"))


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


class Worker:
    """A draft worker that records requests."""

    def __init__(self) -> None:
        self.requests: list[DraftRequest] = []

    def ask(self, commits: list[Commit], request: DraftRequest) -> None:
        self.requests.append(request)

    def missed_draft(self, asked_s: float, *, is_pending: bool) -> None:
        pass


def a_session() -> tuple[DraftSession, Worker]:
    worker = Worker()
    return DraftSession(1, worker, Patience(), has_probs=False), worker


async def drafted(session: DraftSession, base_length: int, next_id: int, *response: int) -> Draft:
    """The draft for a text of this length and last id; the worker responds with `response` if there is any."""
    if response:
        request = asyncio.ensure_future(session.draft(base_length, next_id, 4, 50, 60.0, num_outcomes=3))
        await asyncio.sleep(0)
        session.deliver(DraftedBlock(base_length=base_length, next_id=next_id, ids=response))
        return await request
    return await session.draft(base_length, next_id, 4, 50, 0.05, may_be_late=True, num_outcomes=3)


def push(session: DraftSession, base_length: int, next_id: int, *ids: int) -> None:
    block = DraftedBlock(base_length=base_length, next_id=next_id, ids=ids, is_ahead=True)
    block.num_ahead_ids, block.num_ahead_tokens = len(ids), 3 * len(ids)
    session.deliver(block)


async def test_a_pushed_draft_is_used_before_the_response_which_is_dropped() -> None:
    session, worker = a_session()
    await drafted(session, 5, 1, 7, 8)
    push(session, 6, 9, 1, 2)
    push(session, 7, 9, 3, 4)
    draft = await drafted(session, 7, 9)
    assert (list(draft.ids), draft.num_ahead_ids, draft.num_ahead_tokens) == ([3, 4], 2, 6)
    assert [(one.base_length, one.num_outcomes) for one in worker.requests] == [(5, 3), (7, 3)]
    session.deliver(DraftedBlock(base_length=7, next_id=9, ids=[3, 4]))
    assert list((await drafted(session, 8, 1, 5)).ids) == [5]


async def test_a_pushed_draft_is_not_used_after_the_next_response() -> None:
    session, _ = a_session()
    await drafted(session, 5, 1, 7, 8)
    push(session, 7, 9, 3, 4)
    await drafted(session, 6, 2, 7)
    with pytest.raises(DraftFailedError, match="no draft within"):
        await drafted(session, 7, 9)


async def test_pushed_drafts_are_not_used_while_a_response_is_to_be_dropped() -> None:
    session, _ = a_session()
    push(session, 7, 9, 3, 4)
    assert (await drafted(session, 7, 9)).ids
    push(session, 9, 9, 3, 4)
    with pytest.raises(DraftFailedError, match="no draft within"):
        await drafted(session, 9, 9)


async def test_stale_and_duplicate_pushed_drafts_change_nothing() -> None:
    session, _ = a_session()
    for _ in range(2):
        push(session, 7, 9, 3, 4)
    for next_id in range(100, 200):  # a worker that floods
        push(session, 7, next_id, 5)
    push(session, 8, 8, 60)  # outside the vocabulary
    assert list((await drafted(session, 7, 9)).ids) == [3, 4]
    for _ in range(2):
        session.deliver(DraftedBlock(base_length=7, next_id=9, ids=[3, 4]))
        push(session, 7, 9, 3, 4)
    with pytest.raises(DraftFailedError, match="a draft for length 7"):  # the second response answers no request
        await drafted(session, 8, 8)
