"""Verify workers die, hang and return false results: the tokens stay the target's own, and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from betoken.common.errors import UnavailableError
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.failover import _AttemptFailedError
from betoken.router.workers.verify_session import SequenceLostError
from betoken.v1.draft_pb2 import DraftedBlock, DraftLinkResponse
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    SamplingParams,
)
from tests.clock import Clock
from tests.router.harness import PROMPT, MakeCluster, generate_and, request


@pytest.mark.parametrize("options", [{}, {"off": True}])
async def test_a_verifier_killed_in_the_middle_is_replaced_by_another(
    make_cluster: MakeCluster, options: dict[str, Any]
) -> None:
    cluster = await make_cluster(num_verifiers=2, step_s=0.001)

    async def kill() -> None:
        await next(worker for worker in cluster.verifiers if worker.num_open).kill()

    reply = await generate_and(cluster, 200, 20, kill, **options)
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


async def test_the_only_verifier_killed_is_waited_for(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)

    async def kill() -> None:
        await cluster.verifiers[0].kill()
        await cluster.until(lambda: not cluster.router.verify.workers[0].link.is_up)
        await cluster.verifiers[0].start()

    reply = await generate_and(cluster, 200, 20, kill)
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert reply.finish.speculation.num_failovers >= 1
    await cluster.until_idle()


async def test_a_wait_for_a_verifier_is_bounded(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(failover_timeout_s=0.2, step_s=0.001)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await generate_and(cluster, 400, 20, cluster.verifiers[0].kill)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "0.2 s" in failed.value.details()
    await cluster.until(lambda: not cluster.drafters[0].num_open)


async def test_many_sequences_of_a_dead_verifier_are_reopened_a_few_at_a_time(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, max_reopens=2, step_s=0.001)
    replies = [
        asyncio.ensure_future(
            cluster.generate(prompt_ids=[i + 1, 2], max_new_tokens=150, ignore_eos=True, num_draft_tokens=4)
        )
        for i in range(12)
    ]
    await cluster.until(lambda: cluster.verifiers[0].num_blocks > 10)
    await cluster.verifiers[0].kill()
    for i, reply in enumerate(await asyncio.gather(*replies)):
        assert reply.ids == cluster.target_ids(150, [i + 1, 2])
    await cluster.until_idle()


async def test_sequences_that_wait_for_others_to_be_reopened_are_not_given_up(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(
        num_verifiers=2, num_drafters=0, max_reopens=1, failover_timeout_s=0.6, step_s=0.1, max_concurrency=30
    )
    replies = [
        asyncio.ensure_future(cluster.generate(prompt_ids=[i + 1, 2], max_new_tokens=10, ignore_eos=True))
        for i in range(30)
    ]
    await cluster.until(lambda: all(worker.num_open == 15 for worker in cluster.verifiers))
    await cluster.verifiers[0].kill()  # 15 re-opened one by one, a step each, take twice the time allowed
    for i, reply in enumerate(await asyncio.gather(*replies)):
        assert reply.ids == cluster.target_ids(10, [i + 1, 2])
    await cluster.until_idle()


async def test_sequences_are_given_up_in_time_where_none_can_be_reopened(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, num_drafters=0, max_reopens=1, failover_timeout_s=0.3, step_s=0.01)
    replies = [asyncio.ensure_future(cluster.generate(max_new_tokens=500, ignore_eos=True)) for _ in range(8)]
    await cluster.until(lambda: all(worker.num_open == 4 for worker in cluster.verifiers))
    cluster.verifiers[1].is_hanging = True
    await cluster.until(lambda: not cluster.verifiers[1].is_stepping)
    await cluster.verifiers[0].kill()
    started_s = time.monotonic()
    await cluster.until(lambda: sum(reply.done() for reply in replies) == 4)
    assert 0.3 < time.monotonic() - started_s
    done, pending = await asyncio.wait(replies, timeout=0.3)
    assert len(done) == 4
    for reply in done:
        failed = reply.exception()
        assert isinstance(failed, grpc.aio.AioRpcError) and failed.code() is grpc.StatusCode.UNAVAILABLE
    for reply in pending:
        reply.cancel()


async def test_a_sequence_that_takes_its_workers_along_has_no_time_of_the_others(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=0, failover_timeout_s=0.3)
    failover, worker = cluster.router._failover, cluster.router.verify.workers[0]

    async def lost_again(*args: Any) -> Any:
        raise _AttemptFailedError(worker, SequenceLostError("gone"))

    async def others_come_back() -> None:
        while True:
            failover._progressed()
            await asyncio.sleep(0.05)

    failover._try = lost_again  # type: ignore[method-assign]
    others = asyncio.ensure_future(others_come_back())
    generation = GenerationRequest("r", PROMPT, SamplingParams(), VERIFICATION_MODE_COUPLED, (), 83)
    async with asyncio.timeout(2.0):
        with pytest.raises(UnavailableError, match="gone"):
            await failover.reopen(generation, (), worker.identity, worker, SequenceLostError("gone"))
    others.cancel()


async def test_a_sequence_reopened_as_its_request_is_cancelled_is_closed(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, num_drafters=0, step_s=0.005)
    failover, loop = cluster.router._failover, asyncio.get_running_loop()
    reopen, attempt = failover.reopen, failover._try
    requests: list[asyncio.Task[Any]] = []

    async def noted(*args: Any) -> Any:
        requests.append(asyncio.current_task())
        return await reopen(*args)

    async def cancelled(*args: Any) -> Any:
        opened = await attempt(*args)
        loop.call_soon(requests[0].cancel)  # in the turn in which the session is handed over
        return opened

    failover.reopen, failover._try = noted, cancelled

    async def kill() -> None:
        await next(worker for worker in cluster.verifiers if worker.num_open).kill()

    answer = asyncio.ensure_future(generate_and(cluster, 400, 5, kill, off=True))
    await cluster.until(lambda: bool(requests) and requests[0].done())
    answer.cancel()
    await cluster.until_idle()
    assert not any(worker._sessions for worker in cluster.router.verify.workers)


@pytest.mark.parametrize("fault", ["stale", "bad_next_id", "bad_base", "bad_accepted", "error_code"])
@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_a_verifier_that_errs_once_is_asked_again(
    make_cluster: MakeCluster, fault: str, num_verifiers: int
) -> None:
    cluster = await make_cluster(num_verifiers=num_verifiers)

    async def spoil() -> None:
        serving = next(worker for worker in cluster.verifiers if worker.num_open)
        setattr(serving.faults, fault, 13 if fault == "error_code" else 1)

    reply = await generate_and(cluster, 400, 10, spoil)
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


@pytest.mark.parametrize("fault", ["no_logprobs", "bad_logprobs", "bad_top_logprobs"])
async def test_a_result_without_its_logprobs_is_no_result(make_cluster: MakeCluster, fault: str) -> None:
    cluster = await make_cluster()

    async def spoil() -> None:
        setattr(cluster.verifiers[0].faults, fault, 1)

    reply = await generate_and(cluster, 400, 10, spoil, logprobs=1)
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert [list(token.logprobs.top_ids) for token in reply.tokens] == [[token_id] for token_id in reply.ids]
    assert {token.logprobs.logprob for token in reply.tokens} == {-0.5}
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


async def test_times_that_are_no_times_end_no_answer(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()

    async def spoil() -> None:
        cluster.verifiers[0].faults.bad_times = 8

    reply = await generate_and(cluster, 80, 10, spoil)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert reply.finish.speculation.verify_forward_ns == (1 << 64) - 1


async def test_a_worker_that_floods_loses_its_link_only(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)
    (drafter,), worker = cluster.drafters, cluster.router.draft.workers[0]
    downs: list[str] = []
    down = worker.link._callbacks.on_down
    object.__setattr__(worker.link._callbacks, "on_down", lambda why: (downs.append(str(why)), down(why)))

    async def flood() -> None:
        frame = DraftLinkResponse()
        frame.blocks.extend([DraftedBlock()] * 100_000)
        await drafter.links[0].context.write(frame)

    reply = await generate_and(cluster, 200, 10, flood)
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert downs == ["frame = 100000 entries: must be at most 65536 of a kind"]


async def test_a_verifier_that_hangs_is_left(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.3)

    async def hang() -> None:
        next(worker for worker in cluster.verifiers if worker.num_open).is_hanging = True

    reply = await generate_and(cluster, 300, 10, hang)
    assert reply.ids == cluster.target_ids(300, PROMPT)
    assert reply.finish.speculation.num_failovers >= 1
    await cluster.until_idle()


async def test_a_verifier_that_hangs_is_left_for_one_that_comes_back_meanwhile(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, failover_timeout_s=2.0)
    restarted = []

    async def restart(serving: Any, other: Any) -> None:
        await cluster.until(lambda: other.num_open == 1)  # reopened on the idle worker
        await serving.start()

    async def kill() -> None:
        serving, other = sorted(cluster.verifiers, key=lambda worker: -worker.num_open)
        other.is_hanging = True
        await serving.kill()
        restarted.append(asyncio.ensure_future(restart(serving, other)))

    reply = await generate_and(cluster, 200, 10, kill)
    await asyncio.gather(*restarted)
    assert reply.ids == cluster.target_ids(200, PROMPT)


async def test_a_prompt_may_take_longer_than_a_result(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.5, failover_timeout_s=0.5, step_s=0.02)
    for verifier in cluster.verifiers:
        verifier.prefill_rows = 2  # 200 ids: 99 steps, two seconds

    async def kill() -> None:
        await next(worker for worker in cluster.verifiers if worker.num_open).kill()

    prompt = [1 + i % 5 for i in range(200)]
    reply = await generate_and(cluster, 40, 10, kill, prompt_ids=prompt)
    assert reply.ids == cluster.target_ids(40, prompt)
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


async def test_two_verifiers_that_fail_in_turn_do_not_strand_a_sequence(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.3, failover_timeout_s=3.0)
    hanging: list[Any] = []

    async def hang_then_spoil() -> None:
        hanging.append(next(worker for worker in cluster.verifiers if worker.num_open))
        hanging[0].is_hanging = True
        other = next(worker for worker in cluster.verifiers if worker is not hanging[0])
        await cluster.until(lambda: other.num_blocks > 5)
        other.faults.stale = 1  # sends the sequence back to the hanging one, and from there here again

    reply = await generate_and(cluster, 1500, 10, hang_then_spoil)
    assert reply.ids == cluster.target_ids(1500, PROMPT)
    assert reply.finish.speculation.num_failovers == 2
    await cluster.until_idle()


async def test_a_sequence_that_is_nowhere_reopened_ends_with_the_reason_before_its_deadline(
    make_cluster: MakeCluster, clock: Clock
) -> None:
    patience = {"failover_timeout_s": 1000.0, "verify_timeout_s": 1000.0}
    cluster = await make_cluster(**patience, num_drafters=0, step_s=0.002)
    verifier, failover = cluster.verifiers[0], cluster.router._failover
    message = request(prompt_ids=PROMPT, ignore_eos=True, max_new_tokens=2000)

    async def read() -> None:
        async for event in cluster.stub.Generate(message, timeout=60.0):
            if event.HasField("tokens"):
                await verifier.kill()

    async def fail() -> Any:
        reading = asyncio.ensure_future(read())
        await cluster.until(lambda: bool(failover._waiting))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await clock.hurry(reading)
        return failed.value

    code = verifier.faults.open_error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    full = await fail()
    assert (full.code().value[0], "betoken-retry-after-ms" in dict(full.trailing_metadata())) == (code, True)
    verifier.faults.open_error_code = 0
    lost = await fail()
    assert lost.code() is grpc.StatusCode.UNAVAILABLE and "within 5" in lost.details()


@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_a_sequence_that_every_verifier_fails_at_ends_with_their_fault(
    make_cluster: MakeCluster, num_verifiers: int
) -> None:
    cluster = await make_cluster(num_verifiers=num_verifiers)
    for verifier in cluster.verifiers:
        verifier.faults.open_error_code = grpc.StatusCode.INTERNAL.value[0]
    started_s = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=5)
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert time.monotonic() - started_s < 3.0  # the failover's five seconds are for workers that are away
    await cluster.until_idle()
