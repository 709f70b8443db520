"""How long a session waits for a result: by the clock, but not of a worker that says it is not yet its turn."""

from __future__ import annotations

import asyncio

import pytest

from betoken.router.workers.draft import Draft
from betoken.router.workers.mailbox import Patience
from betoken.router.workers.verify_requests import Grant, Verification
from betoken.router.workers.verify_session import ResultLimits, SequenceLostError, VerifySession
from betoken.v1.verify_pb2 import DraftBlock, VerificationResult

TIMEOUT_S = 0.05


class Host:
    """A worker that takes everything and says nothing."""

    def send_block(self, block: DraftBlock) -> None: ...

    def close_session(self, session: VerifySession) -> None: ...

    def fell_silent(self) -> None: ...


def session_with(reported: list[None], timeout_s: float = TIMEOUT_S) -> VerifySession:
    return VerifySession(1, Host(), ResultLimits(100), Patience(), timeout_s, lambda: reported.append(None))


async def test_a_block_is_waited_for_as_long_as_the_worker_has_it_pending() -> None:
    reported: list[None] = []
    session = session_with(reported)
    loop = asyncio.get_running_loop()
    for part in range(6):
        loop.call_later(part * TIMEOUT_S, session.pending)
    loop.call_later(6 * TIMEOUT_S, session.deliver, VerificationResult(sequence_id=1, base_length=3, next_id=7))
    assert (await session.next_granted(3)).next_id == 7
    assert len(reported) == 6


@pytest.mark.parametrize("was_pending", [False, True])
async def test_a_silent_worker_has_lost_its_block(was_pending: bool) -> None:
    session = session_with([], timeout_s=10 * TIMEOUT_S)
    if was_pending:
        session.pending()  # an earlier block
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(SequenceLostError, match="no verification result"):
        await session.next_granted(3)
    assert asyncio.get_running_loop().time() - started_s < 20 * TIMEOUT_S


async def test_the_result_timeout_may_shrink_during_the_wait() -> None:
    session = session_with([], timeout_s=1000.0)
    has_other = False

    def is_enough(silent_s: float) -> bool:
        return has_other and silent_s >= 3 * TIMEOUT_S

    waiting = asyncio.ensure_future(session.next_granted(3, is_enough))
    for _ in range(5):
        await asyncio.sleep(TIMEOUT_S)
        session.pending()  # the silence begins anew
    assert not waiting.done()
    has_other = True
    with pytest.raises(SequenceLostError, match="no verification result"):
        await asyncio.wait_for(waiting, 5)


def test_a_shorter_grant_takes_nothing_back() -> None:
    """The worker still decodes as far as the earlier one reaches: what it sends meanwhile answers no draft."""
    session = session_with([])
    session.grant(Grant(base_length=3, num_tokens=64, num_draft_tokens=3))
    session.grant(Grant(base_length=10, num_tokens=16, num_draft_tokens=3, drafter="ngram"))
    assert session.granted == Grant(base_length=10, num_tokens=57, num_draft_tokens=3, drafter="ngram")


async def test_a_result_on_the_workers_own_draft_answers_no_other_draft() -> None:
    session = session_with([])
    draft = Draft(ids=[5, 6], probs=(), parents=(), sources=(), queue_ns=0, forward_ns=0, num_forwards=1)
    result = VerificationResult(sequence_id=1, base_length=3, num_draft_tokens=2, num_accepted=1, next_id=7)
    session.deliver(result)
    assert await session.verify(Verification(3, draft)) == result
    result.attached.accepted_ids.append(8)
    session.deliver(result)
    with pytest.raises(SequenceLostError, match="a verification result that cannot be at 3"):
        await session.verify(Verification(3, draft))
