"""Intake: the stages of one request, and the order of its checks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from betoken.common.errors import InvalidArgumentError, NotFoundError, UnavailableError
from betoken.router.access.keys import ANYBODY
from betoken.router.intake import Received, encode, parse, prepare, resolve
from betoken.router.request.generation import GenerationRequest
from tests.router.harness import Cluster, MakeCluster, request


def received(**fields: Any) -> Received:
    return Received(request(**fields), ANYBODY, "r", "", 0.01, math.inf, 0)


async def prepared(cluster: Cluster, **fields: Any) -> GenerationRequest:
    message = request(**fields)
    return await prepare(message, cluster.router, request_id="r", traceparent="", timeout_s=0.01)


async def test_each_intake_stage_keeps_the_record_of_the_stage_before(make_cluster: MakeCluster) -> None:
    router, first = (await make_cluster()).router, received(prompt="the on", seed=3, tenant="t")
    parsed = await parse(first, router)
    encoded = await encode(parsed, router)
    generation = await resolve(encoded, router)
    assert (parsed.received, encoded.parsed) == (first, parsed)
    assert list(generation.prompt_ids) == list(encoded.prompt_ids) == router.tokenizer.encode("the on")
    assert (generation.sampling.seed, generation.tenant, generation.request_id) == (3, "t", "r")
    assert generation.identity == parsed.served.identity


async def test_intake_rejects_a_malformed_message_before_it_waits_for_a_worker(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"tokenizer_hash": "other"}], num_drafters=0, wait_ready=False)
    with pytest.raises(InvalidArgumentError, match="tenant"):
        await prepared(cluster, tenant="t" * 129)
    with pytest.raises(UnavailableError, match="no verify worker"):
        await prepared(cluster)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({"model": "other", "num_draft_tokens": 99, "prompt_ids": [10_000]}, "model 'other'"),
        ({"num_draft_tokens": 17, "prompt_ids": [10_000]}, "num_draft_tokens"),
        ({"prompt_ids": [10_000], "top_k": 10_000}, "prompt_ids"),
        ({"top_k": 10_000, "prediction": {"ids": {"ids": [10_000]}}}, "top_k"),
        ({"prediction": {"ids": {"ids": [10_000]}}, "drafter": "oracle"}, "prediction"),
        ({"drafter": "oracle", "constraint": {"json_object": True}}, "drafter"),
        ({"constraint": {"json_object": True}, "mode": 2}, "constraint"),
    ],
)
async def test_intake_reports_the_first_of_two_faults_in_the_order_of_its_stages(
    make_cluster: MakeCluster, fields: dict[str, Any], first: str
) -> None:
    with pytest.raises((InvalidArgumentError, NotFoundError), match=first):
        await prepared(await make_cluster(), **fields)
