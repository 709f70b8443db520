"""Admission: bounded, first come first served, nothing leaks."""

from __future__ import annotations

import asyncio

import pytest

from betoken.common.errors import ResourceExhaustedError, UnavailableError
from betoken.router.policy.account import Account, Limits
from betoken.router.policy.admission import Admission
from betoken.router.workers.circuit_breaker import CircuitBreaker


class Workers:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def none_ready(self, waited_s: float) -> UnavailableError:
        return UnavailableError(f"nobody for {waited_s} s")


async def hold(admission: Admission, log: list[str], name: str, release: asyncio.Event) -> None:
    async with admission.slot():
        log.append(name)
        await release.wait()


async def test_admission_runs_and_queues_bounded_requests_and_rejects_the_rest() -> None:
    admission = Admission(2, 1, 5.0, Workers(100))
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


async def test_an_admission_wait_that_is_too_long_is_rejected_and_leaves_no_state() -> None:
    admission = Admission(1, 5, 0.02, Workers(1))
    async with admission.slot():
        with pytest.raises(ResourceExhaustedError, match="not admitted"):
            async with admission.slot():
                pass
        assert admission.num_waiting == 0
    async with admission.slot() as queue_ns:
        assert queue_ns >= 0


async def test_an_admission_wait_without_workers_ends_unavailable() -> None:
    workers = Workers(0)
    admission = Admission(4, 5, 0.3, workers)
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
        workers.capacity = 1
        admission.capacity_changed()
        await asyncio.sleep(0.01)
        assert log == ["a"]
        release.set()
    assert log == ["a", "b"]


async def test_a_cancelled_waiter_gives_its_place_away() -> None:
    admission = Admission(1, 5, 5.0, Workers(1))
    log: list[str] = []
    release = asyncio.Event()
    tasks = [asyncio.ensure_future(hold(admission, log, name, release)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert log == ["a", "c"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_request_cancelled_in_the_turn_of_its_admission_frees_its_slot() -> None:
    admission = Admission(1, 5, 5.0, Workers(1))
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


async def test_admission_turns_go_to_the_tenant_with_fewest_running() -> None:
    admission = Admission(2, 10, 5.0, Workers(100))
    log: list[str] = []
    releases = {name: asyncio.Event() for name in ("a1", "a2", "a3", "a4", "b1", "c1", "b2")}
    async with asyncio.TaskGroup() as tasks:
        for name in releases:
            tasks.create_task(hold_as(admission, log, name, releases[name]))
            await asyncio.sleep(0)
        assert log == ["a1", "a2"]
        for done, turn in (("a1", "b1"), ("a2", "c1"), ("b1", "a3"), ("c1", "b2"), ("b2", "a4")):
            releases[done].set()
            await asyncio.sleep(0.01)
            assert log[-1] == turn
        releases["a3"].set()
        releases["a4"].set()
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def hold_as(admission: Admission, log: list[str], name: str, release: asyncio.Event) -> None:
    async with admission.slot(tenant=name[0]):
        log.append(name)
        await release.wait()


async def test_a_full_queue_makes_room_for_a_tenant_with_less_in_it() -> None:
    admission = Admission(1, 3, 5.0, Workers(1))
    log: list[str] = []
    release = asyncio.Event()
    tasks = {}
    for name in ("a1", "a2", "a3", "a4", "b1"):
        tasks[name] = asyncio.ensure_future(hold_as(admission, log, name, release))
        await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="queue of 3") as evicted:
        await tasks.pop("a4")  # the last of those who have most
    assert evicted.value.retry_after_s is not None
    for newcomer in ("a", "b"):  # two of a and one of b wait: no tenant has twice as many
        with pytest.raises(ResourceExhaustedError, match="queue of 3"):
            async with admission.slot(tenant=newcomer):
                pass
    assert admission.num_waiting == 3
    release.set()
    await asyncio.gather(*tasks.values())
    assert log == ["a1", "b1", "a2", "a3"]


async def test_a_request_at_its_own_limit_does_not_block_others() -> None:
    admission = Admission(4, 10, 5.0, Workers(4))
    account = Account("key k", Limits(max_streams=1))
    log: list[str] = []
    release = asyncio.Event()

    async def hold_own(name: str) -> None:
        async with admission.slot(accounts=(account,)):
            log.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold_own("a1"))
        tasks.create_task(hold_own("a2"))
        await asyncio.sleep(0)
        tasks.create_task(hold(admission, log, "b", release))
        await asyncio.sleep(0)
        assert (log, account.num_running, account.num_waiting) == (["a1", "b"], 1, 1)
        account.limits = Limits(max_streams=2)
        admission.capacity_changed()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log == ["a1", "b", "a2"]
        release.set()
    assert (account.num_running, account.num_waiting, admission.num_running) == (0, 0, 0)


async def test_a_request_evicted_and_cancelled_in_one_turn_frees_its_place() -> None:
    admission = Admission(1, 2, 5.0, Workers(1))
    log: list[str] = []
    release = asyncio.Event()
    tasks = []
    for name in ("a1", "a2", "a3"):
        tasks.append(asyncio.ensure_future(hold_as(admission, log, name, release)))
        await asyncio.sleep(0)
    newcomer = asyncio.ensure_future(hold_as(admission, log, "b1", release))
    await asyncio.sleep(0)
    tasks[2].cancel()
    release.set()
    results = await asyncio.gather(*tasks, newcomer, return_exceptions=True)
    assert isinstance(results[2], asyncio.CancelledError | ResourceExhaustedError)
    assert log == ["a1", "b1", "a2"]
    assert (admission.num_running, admission.num_waiting) == (0, 0)
