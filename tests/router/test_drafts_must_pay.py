"""A drafter that costs more time than it saves is left out, unless drafts are asked for by number."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from betoken.common.economy.policy import SpeculationPolicy, Step
from tests.router.harness import Cluster, MakeCluster

PROMPT = [9, 8, 7]
LONG: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 200}


async def drafts_after(cluster: Cluster, busy_s: float, num_streams: int = 1, **options: Any) -> int:
    """Draft blocks of one more answer, after so long a time of answers in `num_streams` at once."""
    expected = cluster.target_ids(200, PROMPT)

    async def stream(end_s: float) -> None:
        while time.monotonic() < end_s:
            assert (await cluster.generate(**LONG, **options)).ids == expected

    end_s = time.monotonic() + busy_s
    await asyncio.gather(*(stream(end_s) for _ in range(num_streams)))
    reply = await cluster.generate(**LONG, **options)
    assert reply.ids == expected
    await cluster.until_idle()
    return reply.finish.speculation.num_drafts


async def slow_drafter(make_cluster: MakeCluster, **settings: Any) -> Cluster:
    cluster = await make_cluster(**settings)
    cluster.drafters[0].agreement, cluster.drafters[0].step_s = 0.1, 0.02
    cluster.verifiers[0].step_s = 0.001
    return cluster


async def test_drafts_that_do_not_pay_are_left_out(make_cluster: MakeCluster) -> None:
    cluster = await slow_drafter(make_cluster, drafter="model")
    assert await drafts_after(cluster, 3.0) < 40  # all of them would be about 180
    assert await drafts_after(cluster, 0.0, drafter="ngram") > 20  # of another drafter nothing is known for a second
    assert await drafts_after(cluster, 0.0, num_draft_tokens=4) > 100


async def test_auto_leaves_drafts_out_if_those_of_no_drafter_pay(make_cluster: MakeCluster) -> None:
    cluster = await slow_drafter(make_cluster)
    num_drafts = [await drafts_after(cluster, 5.0), *[await drafts_after(cluster, 0.0) for _ in range(4)]]
    assert sum(num_drafts) < 200, "five answers with drafts have about 900"


async def test_they_may_be_wanted_all_the_same(make_cluster: MakeCluster) -> None:
    cluster = await slow_drafter(make_cluster, drafts_must_pay=False)
    assert await drafts_after(cluster, 3.0) > 100


@pytest.mark.parametrize("num_streams", [1, 4])
async def test_drafts_that_pay_go_on(make_cluster: MakeCluster, num_streams: int) -> None:
    cluster = await make_cluster()
    cluster.drafters[0].agreement = 0.95
    cluster.verifiers[0].step_s = 0.01
    await drafts_after(cluster, 3.0, num_streams)
    assert max([await drafts_after(cluster, 0.0) for _ in range(3)]) > 30  # rounds of 4 to 5 tokens


async def test_tokens_without_a_draft_worker_do_not_count_as_drafted(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(step_s=0.002)
    drafter, link = cluster.drafters[0], cluster.router.draft.workers[0].link
    num_drafted: list[int] = []
    record = SpeculationPolicy.record

    def noted(policy: SpeculationPolicy, step: Step) -> None:
        if policy.is_on and not link.is_up:
            num_drafted.append(step.num_tokens)
        record(policy, step)

    monkeypatch.setattr(SpeculationPolicy, "record", noted)
    answer = asyncio.ensure_future(cluster.generate(**LONG))
    await cluster.until(lambda: drafter.num_blocks > 5)
    await drafter.kill()
    assert (await answer).ids == cluster.target_ids(200, PROMPT)
    assert len(num_drafted) <= 2, "the rounds under way, and no plain step after them"
    await cluster.until_idle()


async def test_time_spent_on_drafts_that_are_late_again_and_again_counts(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(step_s=0.005, draft_timeout_s=0.1, first_draft_timeout_s=20.0)
    drafter = cluster.drafters[0]
    answer, num_steps = drafter._answer, Counter[int]()
    drafter.step_s = 0.01

    def late(frame: Any, link: Any, sequence_id: int, sequence: Any, started_ns: int) -> None:
        num_steps[sequence.length] += 1
        if num_steps[sequence.length] < 30:
            frame.pending_ids.append(sequence_id)
        else:
            answer(frame, link, sequence_id, sequence, started_ns)

    drafted_s: list[float] = []
    record = SpeculationPolicy.record

    def noted(policy: SpeculationPolicy, step: Step) -> None:
        if policy.is_on:
            drafted_s.append(step.now_s - step.started_s)
        record(policy, step)

    monkeypatch.setattr(drafter, "_answer", late)
    monkeypatch.setattr(SpeculationPolicy, "record", noted)
    reply = await cluster.generate(deadline_s=60.0, **LONG | {"max_new_tokens": 400})
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert reply.finish.speculation.num_failed_drafts > 1
    assert drafted_s and max(drafted_s) > 0.1
    await cluster.until_idle()


async def test_a_drafters_settings_are_checked_even_while_drafts_do_not_pay(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    await cluster.generate(**LONG, drafter="ngram")
    (policy,) = cluster.router.policies._policies.values()
    policy.level(0).is_on = False
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.generate(**LONG, drafter="ngram", drafter_settings={"nonsense": "1"})
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    reply = await cluster.generate(**LONG, drafter="ngram", drafter_settings={"max_ngram": "3"})
    assert reply.ids == cluster.target_ids(200, PROMPT)
    assert reply.finish.speculation.num_drafts == 1
    await cluster.until_idle()


@pytest.mark.parametrize("options", [{"num_drafters": 0}, {"drafter": "none"}])
async def test_settings_for_no_drafter_are_refused(make_cluster: MakeCluster, options: dict[str, Any]) -> None:
    cluster = await make_cluster(**options)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.generate(**LONG, drafter_settings={"max_ngram": "3"})
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.drafter.settings" in refused.value.details()


async def test_settings_reach_a_drafter_that_is_met_later(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.005)
    drafter, link = cluster.drafters[0], cluster.router.draft.workers[0].link
    await drafter.kill()
    await cluster.until(lambda: not link.is_up)
    link.hello = None  # as if it had never been there
    answer = asyncio.ensure_future(cluster.generate(**LONG, drafter_settings={"max_ngram": "3"}))
    await cluster.until(lambda: cluster.verifiers[0].num_open > 0)
    await drafter.start()
    assert (await answer).ids == cluster.target_ids(200, PROMPT)
    opened = [entry for entry in drafter.opened if list(entry.prompt_ids) == PROMPT]
    assert opened and all(entry.drafter.settings == {"max_ngram": "3"} for entry in opened)
