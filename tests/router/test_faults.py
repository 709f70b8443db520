"""Workers die, hang, lie and come back: the tokens stay the target's own, and nothing leaks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from betoken.common.errors import UnavailableError
from betoken.router.request.generation import GenerationRequest
from betoken.router.round import speculator
from betoken.router.round.failover import _AttemptFailedError
from betoken.router.round.speculator import Speculator
from betoken.router.workers.verify_session import SequenceLostError
from betoken.rpc.sampling import resolve_sampling
from betoken.v1 import generation_pb2 as pb
from betoken.v1.draft_pb2 import DraftedBlock, DraftLinkResponse
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_PLAIN,
    VERIFICATION_MODE_COUPLED,
    DrafterChoice,
    Load,
    SamplingParams,
)
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.clock import Clock
from tests.router.harness import Cluster, MakeCluster, Reply, add_event, request

PROMPT = [9, 8, 7]
OPTIONS: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "num_draft_tokens": 4}


async def generate_and(cluster: Cluster, num_new: int, after: int, act: Any, **options: Any) -> Reply:
    """A generation during which `act()` is awaited once `after` tokens have come."""
    reply = Reply()
    acted = False
    usual = {name: value for name, value in OPTIONS.items() if name != "num_draft_tokens" or not options.get("off")}
    message = request(**(usual | {"max_new_tokens": num_new} | options))
    async for event in cluster.stub.Generate(message, timeout=60):
        add_event(reply, event)
        if len(reply.tokens) >= after and not acted:
            acted = True
            await act()
    assert acted
    return reply


@pytest.mark.parametrize(
    "fault",
    [
        {"wrong_base": True},
        {"wrong_next_id": True},
        {"bad_ids": True},
        {"too_many": True},
        {"is_empty": True},
        {"no_sources": True},
        {"bad_sources": True},
        {"bad_times": True},
        {"is_tree": True},
        {"is_silent": True},
        {"error_code": 13},
        {"error_code": 9},
        {"error_code": 8},
    ],
    ids=lambda fault: "-".join(f"{name}{value}" for name, value in fault.items()),
)
async def test_a_drafter_that_errs_costs_time_only(make_cluster: MakeCluster, fault: dict[str, Any]) -> None:
    timeout_s = 0.05 if "is_silent" in fault else 5.0  # a busy machine is late, too
    cluster = await make_cluster(draft_timeout_s=timeout_s, first_draft_timeout_s=timeout_s)
    drafter = cluster.drafters[0]

    async def spoil() -> None:
        for name, value in fault.items():
            setattr(drafter.faults, name, value)

    reply = await generate_and(cluster, 80, 10, spoil)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    is_failure = fault.keys() & {"wrong_base", "wrong_next_id", "is_silent", "error_code"}
    assert bool(reply.finish.speculation.num_failed_drafts) == bool(is_failure)
    assert reply.finish.speculation.num_failed_drafts <= 4
    await cluster.until_idle()


@pytest.mark.parametrize("is_auto", [False, True])
async def test_drafts_begin_when_a_long_prompt_is_computed_without_blocking_the_round(
    make_cluster: MakeCluster, is_auto: bool
) -> None:
    cluster = await make_cluster(draft_timeout_s=0.5, first_draft_timeout_s=0.6, step_s=0.02)
    drafter = cluster.drafters[0]
    drafter.prefill_rows, drafter.step_s = 2, 0.02  # 200 ids: 99 steps, two seconds
    prompt = [1 + i % 5 for i in range(200)]
    options = OPTIONS | {"prompt_ids": prompt, "max_new_tokens": 200}
    if is_auto:
        del options["num_draft_tokens"]
    reply = await cluster.generate(**options)
    assert reply.ids == cluster.target_ids(200, prompt)
    origins = [token.origin for token in reply.tokens]
    assert origins[:20] == [TOKEN_ORIGIN_PLAIN] * 20 and TOKEN_ORIGIN_ACCEPTED in origins
    assert reply.finish.speculation.num_failed_drafts == 1
    assert sum(list(entry.prompt_ids) == prompt for entry in drafter.opened) == 1, "computed once"
    assert cluster.router.draft.workers[0].is_ready
    await cluster.until_idle()


async def test_a_draft_that_waits_for_its_prompt_in_mid_answer_is_waited_for_in_plain_steps(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster(draft_timeout_s=0.3, step_s=0.01)
    drafter = cluster.drafters[0]

    async def lose_pages() -> None:
        """Its KV went to others: the prompt is computed again, for a second."""
        drafter.prefill_rows, drafter.step_s = 1, 0.01
        for link in drafter.links:
            for sequence in link.sequences.values():
                sequence.num_missing_kv = 100

    reply = await generate_and(cluster, 400, 10, lose_pages)
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    assert sum(list(entry.prompt_ids) == PROMPT for entry in drafter.opened) == 1, "not begun anew"
    assert TOKEN_ORIGIN_ACCEPTED in [token.origin for token in reply.tokens[-20:]]
    await cluster.until_idle()


async def test_a_late_drafter_that_never_comes_or_dies_costs_its_drafts_only(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.1, first_draft_timeout_s=0.3, step_s=0.01)
    drafter = cluster.drafters[0]
    drafter.prefill_rows, drafter.step_s = 1, 0.01
    prompt = [1 + i % 5 for i in range(200)]

    async def hang() -> None:
        drafter.is_hanging = True

    reply = await generate_and(cluster, 100, 10, hang, prompt_ids=prompt)
    assert reply.ids == cluster.target_ids(100, prompt)
    assert reply.finish.speculation.num_failed_drafts == 1
    drafter.is_hanging = False
    reply = await generate_and(cluster, 100, 10, drafter.kill, prompt_ids=prompt)
    assert reply.ids == cluster.target_ids(100, prompt)
    assert reply.finish.speculation.num_failed_drafts == 2
    await cluster.until_idle()


async def test_the_circuit_of_a_hanging_drafter_opens_and_a_probe_closes_it(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.05, first_draft_timeout_s=0.05)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.is_silent = True
    reply = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert reply.ids == cluster.target_ids(60, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    assert not worker.is_ready
    quick = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert quick.finish.speculation.num_failed_drafts == 0
    drafter.faults.is_silent = False
    await cluster.until(lambda: worker.is_ready)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=60)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_drafter_that_was_replaced_is_probed_at_once(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=0.05, first_draft_timeout_s=0.05, min_probe_pause_s=60.0)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.is_silent = True
    await cluster.generate(**OPTIONS, max_new_tokens=60)
    await cluster.until(lambda: not worker.is_ready)  # the pause has begun
    await drafter.kill()
    await cluster.until(lambda: not worker.link.is_up)
    drafter.faults.is_silent = False
    await drafter.start()
    await cluster.until(lambda: worker.is_ready)


async def test_a_drafter_killed_in_the_middle_and_back_again(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)
    drafter = cluster.drafters[0]
    restarted = []

    async def kill() -> None:
        cluster.verifiers[0].step_s = 0.02  # the answer is not over before
        await drafter.kill()
        restarted.append(asyncio.ensure_future(restart()))

    async def restart() -> None:
        await cluster.until(lambda: not cluster.router.draft.workers[0].link.is_up)
        await drafter.start()
        await cluster.until(lambda: bool(drafter.opened[-1].committed_ids))
        cluster.verifiers[0].step_s = 0.001

    reply = await generate_and(cluster, 600, 20, kill)
    await asyncio.gather(*restarted)
    assert reply.ids == cluster.target_ids(600, PROMPT)
    assert drafter.opened[-1].committed_ids, "re-opened with what was decided meanwhile"
    await cluster.until_idle()


async def test_sequences_that_were_quiet_while_a_drafter_was_replaced_do_not_count_against_the_new_one(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster()
    drafter, pool = cluster.drafters[0], cluster.router.draft
    sampling = resolve_sampling(
        SamplingParams(), SamplingParams(temperature=0.0), seed=1, prompt_length=3, max_context=83, vocab_size=100
    )
    generation = GenerationRequest("r", PROMPT, sampling, VERIFICATION_MODE_COUPLED, (), 83, drafter=DrafterChoice())
    speculators = [Speculator(generation, pool, cluster.model.vocab_size, 5.0, 5.0) for _ in range(4)]

    async def drafts() -> list[bool]:
        return [bool((await each.draft((), 4, takes_trees=False)).ids) for each in speculators]

    assert await drafts() == [True] * 4
    await drafter.kill()
    await cluster.until(lambda: not pool.workers[0].link.is_up)
    await drafter.start()
    await cluster.until(lambda: pool.workers[0].is_ready)
    assert await drafts() == [False] * 4
    assert pool.workers[0].is_ready
    assert await drafts() == [True] * 4
    for each in speculators:
        each.close()
    await cluster.until_idle()


async def test_another_drafter_takes_over(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2)
    serving: list[int] = []

    async def kill() -> None:
        serving.append(next(i for i, worker in enumerate(cluster.drafters) if worker.num_open))
        await cluster.drafters[serving[0]].kill()

    reply = await generate_and(cluster, 80, 10, kill)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert cluster.drafters[1 - serving[0]].num_blocks > 5
    await cluster.until_idle()


async def generate_while_one_drains(cluster: Cluster, workers: Sequence[Any]) -> tuple[Reply, Any]:
    """300 tokens, in the midst of which whoever of `workers` serves them drains; the reply, and that worker."""
    draining: list[Any] = []

    async def drain() -> None:
        draining.append(next(worker for worker in workers if worker.num_open))
        await draining[0].drain()

    reply = await generate_and(cluster, 300, 10, drain)
    assert reply.ids == cluster.target_ids(300, PROMPT)
    return reply, draining[0]


async def test_a_draining_drafter_is_left_for_another(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2, step_s=0.001)
    reply, drained = await generate_while_one_drains(cluster, cluster.drafters)
    assert reply.finish.speculation.num_failed_drafts == 0
    other = next(worker for worker in cluster.drafters if worker is not drained)
    assert other.num_blocks > 20
    await cluster.until_idle()


async def test_a_draining_drafter_that_is_the_only_one_is_left_once_drafts_do_not_pay(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster(step_s=0.001)
    drafter = cluster.drafters[0]
    options = {name: value for name, value in OPTIONS.items() if name != "num_draft_tokens"}
    answer = asyncio.ensure_future(cluster.generate(**options, max_new_tokens=1500))
    await cluster.until(lambda: drafter.num_blocks > 5)
    await drafter.drain()
    await cluster.until(lambda: cluster.router.draft.workers[0].is_draining)
    num_blocks = drafter.num_blocks
    await cluster.until(lambda: drafter.num_blocks > num_blocks + 5)
    (gate,) = cluster.router.policies._policies.values()
    gate._crowds[0].is_worth = False
    await cluster.until(lambda: not drafter.num_open)
    assert not answer.done()
    assert (await answer).ids == cluster.target_ids(1500, PROMPT)


async def test_settings_that_another_drafter_refuses_in_the_middle_end_no_answer(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=2)

    async def kill() -> None:
        serving, other = sorted(cluster.drafters, key=lambda drafter: -drafter.num_open)
        other.faults.refuses_settings = True
        await serving.kill()

    reply = await generate_and(cluster, 80, 10, kill, drafter="ngram", drafter_settings={"max_ngram": "3"})
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 2
    await cluster.until_idle()


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
        asyncio.ensure_future(cluster.generate(prompt_ids=[i + 1, 2], max_new_tokens=150, ignore_eos=True))
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
    assert 0.3 < time.monotonic() - started_s < 2.0
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
async def test_a_verdict_without_its_logprobs_is_no_verdict(make_cluster: MakeCluster, fault: str) -> None:
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


async def test_unrequested_drafts_are_not_kept(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.01)
    (drafter,), (verifier,), worker = cluster.drafters, cluster.verifiers, cluster.router.draft.workers[0]

    async def flood() -> None:
        verifier.is_hanging = True
        # The draft has come, the verdict has not.
        await cluster.until(lambda: any(held.blocks for link in verifier.links for held in link.sequences.values()))
        (sequence_id,) = drafter.links[0].sequences
        frame = DraftLinkResponse(blocks=[DraftedBlock(sequence_id=sequence_id, base_length=1)] * 5000)
        await drafter.links[0].context.write(frame)
        (session,) = worker._sessions.values()
        await cluster.until(lambda: bool(session._mailbox._items))
        assert len(session._mailbox._items) < 5000
        verifier.is_hanging = False
        verifier.work.set()

    reply = await generate_and(cluster, 80, 10, flood)
    assert reply.ids == cluster.target_ids(80, PROMPT)
    assert reply.finish.speculation.num_failed_drafts == 1
    await cluster.until_idle()


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


async def silenced(cluster: Cluster) -> tuple[Any, Any]:
    """The fake worker that hangs, having cost one of two sequences its place, and the router's view of it."""
    hanging, worker = cluster.verifiers[0], cluster.router.verify.workers[0]
    hanging.is_hanging = True
    replies = await asyncio.gather(*(cluster.generate(**OPTIONS, max_new_tokens=30) for _ in range(2)))
    assert sum(reply.finish.speculation.num_failovers for reply in replies) == 1
    assert worker.is_silent and worker.is_ready
    return hanging, worker


async def test_a_verifier_that_hangs_gets_nothing_new_until_it_gives_a_sign(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.3)
    hanging, worker = await silenced(cluster)
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert [(entry.state, bool(entry.detail)) for entry in info.verify_workers] == [("ready", True), ("ready", False)]
    num_opened = len(hanging.opened)
    replies = await asyncio.gather(*(cluster.generate(**OPTIONS, max_new_tokens=30) for _ in range(8)))
    assert not any(reply.finish.speculation.num_failovers for reply in replies)
    assert len(hanging.opened) == num_opened

    async def err() -> None:
        cluster.verifiers[1].faults.stale = 1

    reply = await generate_and(cluster, 200, 10, err)  # a sequence lost by the other worker fails here, too
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert reply.finish.speculation.num_failovers == 1 and len(hanging.opened) == num_opened

    hanging.is_hanging = False  # idle: all that it has to say is what it holds now
    await hanging.links[0].context.write(VerifyLinkResponse(load=Load()))
    await cluster.until(lambda: not worker.is_silent)
    await asyncio.gather(*(cluster.generate(**OPTIONS, max_new_tokens=30) for _ in range(2)))
    assert len(hanging.opened) == num_opened + 1
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert not any(entry.detail for entry in info.verify_workers)
    await cluster.until_idle()


async def test_a_verifier_that_comes_back_has_said_nothing_yet(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.3)
    hanging, worker = await silenced(cluster)
    await hanging.kill()
    await cluster.until(lambda: not worker.is_ready)
    hanging.is_hanging = False
    await hanging.start()
    await cluster.until(lambda: worker.is_ready)
    assert not worker.is_silent


async def test_verifiers_that_all_hang_still_get_what_there_is(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_timeout_s=0.3)
    verifier, worker = cluster.verifiers[0], cluster.router.verify.workers[0]
    verifier.is_hanging = True
    first = asyncio.ensure_future(cluster.generate(**OPTIONS, max_new_tokens=30))
    await cluster.until(lambda: worker.is_silent)
    second = asyncio.ensure_future(cluster.generate(**OPTIONS, max_new_tokens=30))
    await cluster.until(lambda: verifier.num_open == 2)
    assert cluster.router.verify.capacity == worker.hello.max_sequences
    verifier.is_hanging = False
    verifier.work.set()
    for reply in await asyncio.gather(first, second):
        assert reply.ids == cluster.target_ids(30, PROMPT)
    assert not worker.is_silent
    await cluster.until_idle()


async def test_requests_beyond_what_the_others_hold_wait_until_a_silent_verifier_works_again(
    make_cluster: MakeCluster,
) -> None:
    cluster = await make_cluster(verify_timeout_s=0.3, verify_hellos=[{"max_sequences": 1}] * 2)
    hanging, _ = await silenced(cluster)
    cluster.verifiers[1].step_s = 0.05
    long = asyncio.ensure_future(cluster.generate(**OPTIONS, max_new_tokens=2000))
    await cluster.until(lambda: cluster.verifiers[1].num_open == 1)
    waiting = asyncio.ensure_future(cluster.generate(**OPTIONS, max_new_tokens=30))
    await cluster.until(lambda: cluster.router.admission.num_waiting == 1)
    hanging.is_hanging = False
    await hanging.links[0].context.write(VerifyLinkResponse(load=Load()))
    assert (await waiting).ids == cluster.target_ids(30, PROMPT)
    long.cancel()
    await cluster.until_idle()


async def test_a_draining_verifier_is_not_left_for_a_silent_one(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, verify_timeout_s=0.3, step_s=0.001)
    hanging, _ = await silenced(cluster)
    num_opened = len(hanging.opened)
    reply = await generate_and(cluster, 200, 10, cluster.verifiers[1].drain)
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert reply.finish.speculation.num_failovers == 0 and len(hanging.opened) == num_opened
    await cluster.until_idle()


async def test_a_prompt_may_take_longer_than_a_verdict(make_cluster: MakeCluster) -> None:
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


async def test_a_verifier_that_other_routers_keep_full_is_waited_for(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(failover_timeout_s=0.3)
    faults = cluster.verifiers[0].faults
    faults.open_error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=5)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    num_refused = len(cluster.verifiers[0].opened)
    waiting = asyncio.ensure_future(cluster.generate(max_new_tokens=5))
    await cluster.until(lambda: len(cluster.verifiers[0].opened) > num_refused)
    faults.open_error_code = 0
    assert len((await waiting).ids) == 5
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


async def test_a_verifier_that_other_routers_have_filled_is_left_for_one_with_room(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2)
    full = cluster.verifiers[0]
    full.faults.open_error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(2):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
    assert full.opened
    await cluster.until_idle()


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


async def test_a_draining_verifier_is_left_for_another(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2, step_s=0.001)
    _, drained = await generate_while_one_drains(cluster, cluster.verifiers)
    assert drained.num_open == 0
    await cluster.until_idle()


async def test_a_draining_verifier_is_left_as_far_as_another_has_room(make_cluster: MakeCluster) -> None:
    hellos = [{"max_sequences": 2}, {"max_sequences": 2}]
    cluster = await make_cluster(num_drafters=0, verify_hellos=hellos, step_s=0.001)
    prompts = [[9, 8, last] for last in range(1, 5)]
    options = {"ignore_eos": True, "off": True, "max_new_tokens": 1000}
    answers = {
        prompt[-1]: asyncio.ensure_future(cluster.generate(prompt_ids=prompt, **options, deadline_s=60.0))
        for prompt in prompts
    }
    draining, other = cluster.verifiers
    await cluster.until(lambda: draining.num_open == other.num_open == 2)
    await draining.drain()
    await cluster.until(lambda: cluster.router.verify.workers[0].is_draining)
    await asyncio.sleep(0.1)
    assert draining.num_open == other.num_open == 2
    answers.pop(other.opened[0].prompt_ids[-1]).cancel()
    await cluster.until(lambda: draining.num_open == 1 and other.num_open == 2)
    for last, answer in answers.items():
        assert (await answer).ids == cluster.target_ids(1000, [9, 8, last])
    await cluster.until_idle()


async def test_workers_that_do_not_fit_are_refused_naming_both(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(
        verify_hellos=[{}, {"tokenizer_hash": "0" * 64}, {"weights_fingerprint": "e" * 64}, {"dtype": "bfloat16"}],
        draft_hellos=[{"tokenizer_hash": "0" * 64}, {"tokenizer_hash": "", "vocab_size": 512}],
        wait_ready=False,
    )
    router = cluster.router
    links = [worker.link for worker in (*router.verify.workers, *router.draft.workers)]
    await cluster.until(lambda: router.draft.workers[1].is_ready)
    # Of the three other identities, the first one to respond is served.
    await cluster.until(lambda: sum(link.state == "refused" for link in links) == 4)
    assert cluster.tokenizer.hash in links[1].detail and "0" * 64 in links[1].detail
    assert cluster.tokenizer.hash in links[4].detail and "0" * 64 in links[4].detail
    identities = [link.detail for link in (links[0], links[2], links[3]) if link.state == "refused"]
    assert all("serves weights" in detail or "serves dtype" in detail for detail in identities)
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert "refused" in {worker.state for worker in info.verify_workers}


async def test_workers_are_described_at_once_while_no_verify_worker_is_met(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"tokenizer_hash": "0" * 64}], wait_ready=False, ready_timeout_s=600.0)
    (verify,), (draft,) = cluster.router.verify.workers, cluster.router.draft.workers
    await cluster.until(lambda: verify.link.state == "refused" and draft.is_ready)
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(at_once=True), timeout=30)
    (worker,) = info.verify_workers
    assert (worker.state, worker.detail) == ("refused", verify.link.detail)
    assert info.draft_workers[0].state == "ready" and list(info.drafters) == list(draft.drafters)
    assert (info.model, info.vocab_size, info.system_fingerprint) == ("", 0, "")
    with pytest.raises(grpc.aio.AioRpcError) as waited:
        await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=0.3)
    assert waited.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_model_that_was_met_is_described_the_same_way_at_once(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=0)
    waited, at_once = [
        await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(at_once=at_once), timeout=30)
        for at_once in (False, True)
    ]
    for info in (waited, at_once):
        info.verify_workers[0].ClearField("load")
    assert waited == at_once and waited.model


@pytest.mark.parametrize("limit", ["max_context", "draft_context"])
@pytest.mark.parametrize(("context", "is_reported"), [(1024, True), (2048, False), (4096, False), (0, False)])
async def test_a_draft_model_with_a_shorter_context_is_reported_once_and_shown(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture, limit: str, context: int, is_reported: bool
) -> None:
    cluster = await make_cluster(draft_hellos=[{limit: context}])
    worker = cluster.router.draft.workers[0]
    await cluster.until(lambda: worker.is_ready)
    cluster.router.verify.changed()
    text = "drafts texts of up to 1024 tokens only; the target's context is 2048"
    reported = [record.getMessage() for record in caplog.records if "texts of up to" in record.getMessage()]
    assert reported == ([f"draft worker {worker.link.address} {text}"] if is_reported else [])


async def test_the_shorter_context_of_a_worker_that_is_ready_is_in_its_status(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{"max_context": 1024}, {}])
    await cluster.until(lambda: all(worker.is_ready for worker in cluster.router.draft.workers))
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    details = [worker.detail for worker in info.draft_workers]
    assert details == ["drafts texts of up to 1024 tokens only; the target's context is 2048", ""]


@pytest.mark.parametrize("field", [{"max_context": 64}, {"eos_token_ids": [7]}])
async def test_verifiers_with_other_limits_do_not_serve_together(
    make_cluster: MakeCluster, field: dict[str, Any]
) -> None:
    cluster = await make_cluster(num_drafters=0, verify_hellos=[{}, field], wait_ready=False)
    workers = cluster.router.verify.workers
    await cluster.until(lambda: sorted(worker.link.state for worker in workers) == ["ready", "refused"])
    refused = next(worker for worker in workers if worker.link.state == "refused")
    assert next(iter(field)).replace("_", " ") in refused.link.detail


async def test_verifiers_of_another_identity_take_over_one_by_one(make_cluster: MakeCluster) -> None:
    """As a StatefulSet replaces them: somebody serves at any time."""
    cluster = await make_cluster(num_drafters=0, num_verifiers=2, step_s=0.005)
    (last, first), (old, new) = cluster.verifiers, cluster.router.verify.workers
    plain = {"prompt_ids": PROMPT, "ignore_eos": True, "off": True}

    async def replace(verifier: Any) -> None:
        await verifier.kill()
        verifier.hello.numerics = "of another version"
        await verifier.start()

    await replace(first)
    await cluster.until(lambda: new.link.state == "refused")
    running = asyncio.ensure_future(cluster.generate(**plain, max_new_tokens=200))
    await cluster.until(lambda: last.num_open == 1)
    await last.drain()
    await cluster.until(lambda: new.is_ready)
    await cluster.generate(**plain, max_new_tokens=5)
    assert first.num_steps and last.num_open == 1 and not running.done(), "what runs has the time that a drain gives"
    assert (await running).ids == cluster.target_ids(200, PROMPT)
    await replace(last)
    await cluster.until(lambda: old.is_ready and new.is_ready)


async def test_a_queued_request_is_not_answered_by_another_model(make_cluster: MakeCluster) -> None:
    other = {"weights_fingerprint": "b" * 64, "model_id": "other"}
    cluster = await make_cluster(
        num_drafters=0,
        verify_hellos=[{}, other],
        wait_ready=False,
        step_s=0.01,
        max_concurrency=1,
        failover_timeout_s=30.0,
        allow_weights_change=True,
    )
    await cluster.until(lambda: cluster.router.verify.model is not None)
    served = next(v for v in cluster.verifiers if v.hello.model_id == cluster.router.verify.model.hello.model_id)
    plain = {"prompt_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 2000, "off": True}
    running = asyncio.ensure_future(cluster.generate(**plain))
    await cluster.until(lambda: served.num_open == 1)
    queued = asyncio.ensure_future(cluster.generate(**plain, model=served.hello.model_id))
    await cluster.until(lambda: cluster.router.admission.num_waiting == 1)
    await served.kill()
    for answer in (running, queued):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answer
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    other_worker = next(verifier for verifier in cluster.verifiers if verifier is not served)
    assert not other_worker.opened
    # New requests for it are not blocked, either.
    reply = await cluster.generate(**plain | {"max_new_tokens": 2}, model=other_worker.hello.model_id, deadline_s=5.0)
    assert len(reply.ids) == 2


async def test_a_draft_worker_that_is_full_stays_in_use_for_others(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 60.0)
    cluster = await make_cluster()
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(5):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
    assert worker.is_ready
    assert len(drafter.requests) == 5 + 1  # one each, and the probe: no more for a request within the pause


async def test_a_draft_worker_that_is_full_when_it_is_met_is_in_use_once_it_has_room(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(wait_ready=False, min_probe_pause_s=60.0)
    drafter, worker = cluster.drafters[0], cluster.router.draft.workers[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]  # from before the probe on
    await cluster.until(lambda: worker.is_ready)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    drafter.faults.error_code = 0
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_request_that_a_full_draft_worker_refused_drafts_there_once_it_has_room(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 0.05)
    cluster = await make_cluster(step_s=0.001)
    drafter = cluster.drafters[0]
    drafter.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]

    async def make_room() -> None:
        drafter.faults.error_code = 0

    reply = await generate_and(cluster, 600, 20, make_room)
    assert reply.ids == cluster.target_ids(600, PROMPT)
    assert reply.finish.speculation.num_accepted_tokens > 0
    await cluster.until_idle()


async def test_a_request_that_a_full_draft_worker_refuses_drafts_on_another(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator, "_FULL_PAUSE_S", 60.0)
    cluster = await make_cluster(draft_hellos=[{}, {}])
    full, other = cluster.drafters
    full.faults.error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(3):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
        assert reply.finish.speculation.num_accepted_tokens > 0
    assert len(full.requests) == 3 + 1  # one each, and the probe
    assert len(other.requests) > 3 + 1


async def test_a_draft_worker_that_others_have_filled_is_not_asked(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{"max_sequences": 4}, {"max_sequences": 4}])
    full, other = cluster.drafters
    await cluster.until(lambda: full.requests and other.requests)  # the probes
    await full.links[0].context.write(DraftLinkResponse(load=Load(running=4)))
    worker = next(worker for worker in cluster.router.draft.workers if worker.link.address == full.address)
    await cluster.until(lambda: worker.link.load is not None and worker.link.load.running == 4)
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    assert len(full.requests) == 1 and len(other.requests) > 1


async def test_padded_vocabularies_are_tolerated(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{"vocab_size": 4096}])
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    assert reply.finish.speculation.num_accepted_tokens > 0
