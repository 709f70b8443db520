"""The speculation policy: its state and reason are reported, trials of named drafters, draft timeouts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from betoken.v1.generation_pb2 import GetModelInfoRequest, GetModelInfoResponse, SpeculationPolicy
from tests.router.harness import Cluster, MakeCluster

PROMPT = [9, 8, 7]
COSTS_NS = [361_000_000, 779_000_000]
LONG: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "max_new_tokens": 400}


async def turn_off(cluster: Cluster, drafter: str = "ngram", gain: float = -0.2) -> None:
    """Have drafts of `drafter` not pay, and no trial for a minute."""
    await cluster.generate(**LONG | {"max_new_tokens": 2}, drafter=drafter)
    (policy,) = cluster.router.policies._policies.values()
    level = policy.level(0)
    level.is_on, level.gain, level.backoff, policy._counts_drafted = False, gain, 1e9, False


async def info(cluster: Cluster) -> GetModelInfoResponse:
    return await cluster.stub.GetModelInfo(GetModelInfoRequest())


async def test_a_named_drafter_is_tried_in_every_request_and_every_256_tokens(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    await turn_off(cluster)
    reply = await cluster.generate(**LONG, drafter="ngram")
    assert reply.ids == cluster.target_ids(400, PROMPT)
    assert reply.finish.speculation.num_rounds == 2


async def test_a_drafter_catches_up_after_a_pause_while_the_answer_goes_on(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_timeout_s=20.0, first_draft_timeout_s=20.0)
    await turn_off(cluster)
    (drafter,) = cluster.drafters
    drafter.requests.clear()
    reply = await cluster.generate(**LONG, drafter="ngram")
    assert reply.ids == cluster.target_ids(400, PROMPT)
    caught_up = [request for request in drafter.requests if request.num_tokens == 1 and not request.HasField("terms")]
    assert len(drafter.requests) == 3 and len(caught_up) == 1
    assert reply.finish.speculation.num_failed_drafts == 0


async def test_a_sequence_whose_opening_takes_longer_than_drafts_save_is_not_opened(make_cluster: MakeCluster) -> None:
    cluster, short = await make_cluster(), LONG | {"max_new_tokens": 40}  # before another drafter is tried
    await cluster.generate(**LONG | {"max_new_tokens": 2})
    for policy in cluster.router.policies._policies.values():
        policy.level(0).is_on, policy.level(0).gain = True, 0.05
        policy.add_opening(len(PROMPT), 1e6)
    reply = await cluster.generate(**short)
    assert reply.ids == cluster.target_ids(40, PROMPT)
    assert reply.finish.speculation.num_rounds == 0
    named = await cluster.generate(**short, drafter="ngram")  # drafts once, whatever it costs
    assert named.ids == reply.ids and named.finish.speculation.num_rounds > 0


async def test_an_answer_and_the_model_info_report_why_drafts_are_off(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    await turn_off(cluster)
    reply = await cluster.generate(**LONG, drafter="ngram")
    policy = reply.finish.speculation.policy
    assert (policy.drafter, policy.is_on) == ("ngram", False)
    assert policy.reason == "off: expected 0.82 of decoding without speculation"
    assert list((await info(cluster)).speculation_policies) == [policy]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"num_draft_tokens": 4}, "on: not a choice of the router"), ({}, "on: not measured yet at this load")],
)
async def test_an_answer_reports_why_drafts_are_on(
    make_cluster: MakeCluster, options: dict[str, Any], reason: str
) -> None:
    cluster = await make_cluster()
    reply = await cluster.generate(**LONG | {"max_new_tokens": 4}, drafter="ngram", **options)
    assert reply.finish.speculation.policy.reason == reason
    off = await cluster.generate(**LONG | {"max_new_tokens": 4}, off=True)
    assert not off.finish.speculation.HasField("policy")


async def test_an_answer_without_a_draft_worker_reports_the_reason(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    await cluster.drafters[0].kill()
    await cluster.until(lambda: not cluster.router.draft.workers[0].link.is_up)
    reply = await cluster.generate(**LONG | {"max_new_tokens": 4}, drafter="ngram")
    assert reply.finish.speculation.policy == SpeculationPolicy(
        drafter="ngram", reason="off: no draft worker is available"
    )


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"is_silent": True}, "timeout"),
        ({"wrong_base": True}, "fault"),
        ({"error_code": 13}, "fault"),
        ({"error_code": 3}, "rejected"),
        ({"error_code": 8}, "full"),
    ],
)
async def test_failed_drafts_are_counted_by_reason(
    make_cluster: MakeCluster, fault: dict[str, Any], reason: str
) -> None:
    cluster = await make_cluster(draft_timeout_s=0.05 if "is_silent" in fault else 5.0)
    for name, value in fault.items():
        setattr(cluster.drafters[0].faults, name, value)
    reply = await cluster.generate(**LONG | {"max_new_tokens": 30}, num_draft_tokens=4)
    stats = reply.finish.speculation
    assert set(stats.num_failed_drafts_by_reason) == {reason}
    assert stats.num_failed_drafts_by_reason[reason] == stats.num_failed_drafts > 0


async def test_the_draft_timeout_follows_the_time_of_decode_steps(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(agreement=1.0, step_s=0.2, draft_timeout_s=0.3, first_draft_timeout_s=20.0)
    await cluster.generate(**LONG | {"max_new_tokens": 4}, off=True)
    cluster.drafters[0].step_s = 0.5
    reply = await cluster.generate(**LONG | {"max_new_tokens": 12}, num_draft_tokens=4)
    assert reply.finish.speculation.num_failed_drafts == 0
    assert reply.finish.speculation.num_accepted_tokens > 4


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.5, [180_500_000, 389_500_000]), (math.inf, [2**64 - 1] * 2), (math.nan, COSTS_NS)]
)
async def test_the_model_info_corrects_step_times_by_recent_forwards(
    make_cluster: MakeCluster, ratio: float, expected: list[int]
) -> None:
    cluster = await make_cluster()
    await cluster.generate(**LONG | {"max_new_tokens": 2}, off=True)
    link = cluster.router.verify.workers[0].link
    assert link.hello is not None and link.load is not None
    for rows, ns in zip((1, 8), COSTS_NS, strict=True):
        link.hello.step_costs.add(rows=rows, context=64, ns=ns)
    link.load.step_time_ratio = ratio
    (worker,) = (await info(cluster)).verify_workers
    assert [cost.ns for cost in worker.hello.step_costs] == expected
