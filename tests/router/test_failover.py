"""Time limits of reopening a sequence, with an event loop whose clock advances on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
from asyncio_pool import AioPool

from betoken.common.errors import UnavailableError
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.failover import Committed, Failover
from betoken.router.workers.verify_requests import Grant
from betoken.router.workers.verify_session import SequenceLostError
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED, SamplingParams
from betoken.v1.verify_pb2 import VerificationResult

TIMEOUT_S = 1000.0
REQUEST = GenerationRequest(
    request_id="r",
    prompt_ids=(1, 2, 3),
    sampling=SamplingParams(),
    mode=VERIFICATION_MODE_COUPLED,
    eos_token_ids=(),
    max_length=10,
)


class Session:
    """One attempt."""

    has_pending_prompt_logprobs = False

    def __init__(self, on_pending: Callable[[], None]) -> None:
        self.pending = on_pending
        self.is_enough: Callable[[float], bool]
        self.result: asyncio.Future[VerificationResult] = asyncio.get_running_loop().create_future()

    def grant(self, grant: Grant) -> None: ...

    async def next_granted(self, base_length: int, is_enough: Callable[[float], bool]) -> VerificationResult:
        self.is_enough = is_enough
        return await self.result

    def close(self) -> None: ...

    def lose(self) -> None:
        self.result.set_exception(SequenceLostError("gone"))


class Workers:
    """A pool and its only worker, or two that are alike."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.has_two = False

    def least_loaded(self, identity: Any, avoid: Any) -> Workers | None:
        return self if self.has_two or avoid is not self else None

    async def wait_ready(self, timeout_s: float, identity: Any) -> Workers:
        return self

    def open(
        self,
        request: GenerationRequest,
        committed_ids: Any,
        num_received_logprobs: int,
        on_pending: Callable[[], None],
    ) -> Session:
        self.sessions.append(Session(on_pending))
        return self.sessions[-1]


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_reopens: int = 16) -> None:
        self.workers = Workers()
        self.failover = Failover(cast(Any, self.workers), AioPool(max_reopens), TIMEOUT_S)
        loop = asyncio.get_running_loop()
        real, self._passed_s = loop.time, 0.0
        monkeypatch.setattr(loop, "time", lambda: real() + self._passed_s)

    async def begin(self) -> asyncio.Task[Any]:
        """A sequence that is being re-opened, or waits for it."""
        lost: Any = self.workers
        opening = self.failover.reopen(REQUEST, Committed(()), cast(Any, None), lost, SequenceLostError("first"))
        task = asyncio.ensure_future(opening)
        await self.settle()
        return task

    async def attempts(self, num: int) -> Session:
        """The last of so many."""
        for _ in range(100):
            if len(self.workers.sessions) >= num:
                return self.workers.sessions[num - 1]
            await self.later(0.001)
        raise AssertionError(f"attempt {num} never came")

    async def later(self, share: float) -> None:
        """A part of the time allowed passes."""
        self._passed_s += share * TIMEOUT_S
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(20):
            await asyncio.sleep(0)


async def test_failover_waits_for_a_worker_that_is_reopening_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    task = await bench.begin()
    (await bench.attempts(1)).lose()
    second = await bench.attempts(2)
    for _ in range(4):
        await bench.later(0.8)
        second.pending()
    second.result.set_result(VerificationResult(next_id=7))
    assert (await task)[2].next_id == 7


async def test_a_sequence_that_costs_worker_after_worker_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    task = await bench.begin()
    (await bench.attempts(1)).lose()
    second = await bench.attempts(2)
    await bench.later(0.6)
    second.pending()
    await bench.later(0.6)
    assert not task.done()
    second.lose()
    await bench.settle()
    with pytest.raises(UnavailableError, match="gone"):
        await asyncio.wait_for(task, 5)
    assert len(bench.workers.sessions) == 2


@pytest.mark.parametrize("has_two", [False, True])
async def test_a_worker_that_hangs_leaves_time_for_another(monkeypatch: pytest.MonkeyPatch, has_two: bool) -> None:
    bench = Bench(monkeypatch)
    bench.workers.has_two = has_two
    task = await bench.begin()
    first = await bench.attempts(1)
    assert not first.is_enough(0.49 * TIMEOUT_S)
    assert first.is_enough(0.5 * TIMEOUT_S) == has_two
    await bench.later(0.5)
    first.lose()
    (await bench.attempts(2)).result.set_result(VerificationResult(next_id=7))
    assert (await task)[2].next_id == 7


async def test_a_worker_that_hangs_is_left_for_one_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    task = await bench.begin()
    first = await bench.attempts(1)
    assert not first.is_enough(0.7 * TIMEOUT_S)
    bench.workers.has_two = True
    assert first.is_enough(0.7 * TIMEOUT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_work_on_reopened_sequences_gives_waiting_sequences_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    opened, waiting = await bench.begin(), await bench.begin()
    first, second = await bench.attempts(1), await bench.attempts(2)
    for _ in range(2):
        await bench.later(0.8)
        first.pending()  # both have time anew
    first.result.set_result(VerificationResult(next_id=7))
    await opened
    assert not waiting.done()
    await bench.later(0.8)
    first.pending()  # a later block of a sequence like any other
    await bench.later(0.8)
    with pytest.raises(UnavailableError, match="none could go on"):
        await asyncio.wait_for(waiting, 5)
    assert not second.result.done() or second.result.cancelled()


async def test_workers_may_report_pending_sequences_often(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    tasks = [await bench.begin() for _ in range(16)]
    await bench.later(0.5)
    num_moved = 0
    reschedule = asyncio.Timeout.reschedule

    def counted(limit: asyncio.Timeout, when: float | None) -> None:
        nonlocal num_moved
        num_moved += 1
        reschedule(limit, when)

    monkeypatch.setattr(asyncio.Timeout, "reschedule", counted)
    for _ in range(100):
        for session in bench.workers.sessions:
            session.pending()
    assert 0 < num_moved <= 16
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
