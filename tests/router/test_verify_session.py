"""How long a session waits for a verdict: by the clock, but not of a worker that has others to finish first."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from foretoken.router.mailbox import Patience
from foretoken.router.verify_session import SequenceLostError, VerifySession
from foretoken.v1.types_pb2 import Load
from foretoken.v1.verify_pb2 import Verdict

TIMEOUT_S = 0.05


def session_of(load: Callable[[], Load | None]) -> VerifySession:
    return VerifySession(1, 100, TIMEOUT_S, Patience(), lambda block: None, lambda session: None, load)


async def test_a_worker_that_goes_on_while_sequences_wait_for_pages_is_waited_for() -> None:
    free_pages = itertools.count()
    session = session_of(lambda: Load(running=1, waiting=1, free_pages=next(free_pages)))
    asyncio.get_running_loop().call_later(
        6 * TIMEOUT_S, session.deliver, Verdict(sequence_id=1, base_length=3, next_id=7)
    )
    assert (await session.next_plain(3)).next_id == 7
    assert next(free_pages) >= 2


@pytest.mark.parametrize("load", [None, Load(running=2), Load(running=1, waiting=1)], ids=["away", "idle", "hung"])
async def test_other_workers_have_lost_it(load: Load | None) -> None:
    session = session_of(lambda: load)
    async with asyncio.timeout(20 * TIMEOUT_S):
        with pytest.raises(SequenceLostError, match="no verdict"):
            await session.next_plain(3)
