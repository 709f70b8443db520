"""Admission: bounded, first come first served, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from betoken.common.errors import ResourceExhaustedError, UnavailableError
from betoken.router.policy.admission import Admission
from betoken.router.workers.circuit_breaker import CircuitBreaker


def no_worker(waited_s: float) -> UnavailableError:
    return UnavailableError(f"nobody for {waited_s} s")


async def hold(admission: Admission, log: list[str], name: str, release: asyncio.Event) -> None:
    async with admission.slot():
        log.append(name)
        await release.wait()


async def test_runs_so_many_queues_so_many_and_refuses_the_rest() -> None:
    admission = Admission(2, 1, 5.0, lambda: 100, no_worker)
    log: list[str] = []
    release = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for name in "abc":
            tasks.create_task(hold(admission, log, name, release))
        await asyncio.sleep(0)
        assert (log, admission.num_running, admission.num_waiting) == (["a", "b"], 2, 1)
        with pytest.raises(ResourceExhaustedError, match="queue of 1") as refused:
            async with admission.slot():
                pass
        assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0
        release.set()
    assert log == ["a", "b", "c"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)
    await admission.wait_idle()


async def test_a_wait_that_is_too_long_is_refused_and_leaves_no_trace() -> None:
    admission = Admission(1, 5, 0.02, lambda: 1, no_worker)
    async with admission.slot():
        with pytest.raises(ResourceExhaustedError, match="not admitted"):
            async with admission.slot():
                pass
        assert admission.num_waiting == 0
    async with admission.slot() as queue_ns:
        assert queue_ns >= 0


async def test_without_workers_the_wait_ends_unavailable_and_with_them_it_ends() -> None:
    capacity = 0
    admission = Admission(4, 5, 0.3, lambda: capacity, no_worker)
    with pytest.raises(UnavailableError, match="nobody for 0.3 s"):
        async with admission.slot():
            pass
    log: list[str] = []
    release = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for name in "ab":
            tasks.create_task(hold(admission, log, name, release))
        await asyncio.sleep(0)
        assert log == []
        capacity = 1
        admission.capacity_changed()
        await asyncio.sleep(0.01)
        assert log == ["a"]
        release.set()
    assert log == ["a", "b"]


async def test_a_cancelled_waiter_gives_its_place_away() -> None:
    admission = Admission(1, 5, 5.0, lambda: 1, no_worker)
    log: list[str] = []
    release = asyncio.Event()
    tasks = [asyncio.ensure_future(hold(admission, log, name, release)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log == ["a", "c"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_cancelled_in_the_turn_it_was_admitted() -> None:
    admission = Admission(1, 5, 5.0, lambda: 1, no_worker)
    log: list[str] = []
    never = asyncio.Event()
    async with admission.slot():
        waiter = asyncio.ensure_future(hold(admission, log, "a", never))
        await asyncio.sleep(0)
    waiter.cancel()  # the slot has just been handed to it
    await asyncio.gather(waiter, return_exceptions=True)
    assert (admission.num_running, log) == (0, [])


def test_the_circuit_opens_after_failures_in_a_row_and_closes_with_a_probe() -> None:
    breaker = CircuitBreaker(max_failures=2, min_pause_s=1.0, max_pause_s=3.0)
    assert not breaker.is_closed and breaker.pause_s == 0.0
    breaker.record_probe(True)
    breaker.record_failure()
    breaker.record_success()
    breaker.record_failure()
    assert breaker.is_closed
    breaker.record_failure()
    assert not breaker.is_closed
    pauses = [breaker.pause_s]
    for _ in range(3):
        breaker.record_probe(False)
        pauses.append(breaker.pause_s)
    assert pauses == [1.0, 2.0, 3.0, 3.0]
    breaker.record_probe(True)
    assert breaker.is_closed
    breaker.reset()
    assert breaker.pause_s == 0.0
