"""A request's drafter options are checked against connected workers, and never end an answer that has begun."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.rpc.link import LinkState
from betoken.v1 import generation_pb2 as pb
from tests.router.harness import Cluster, MakeCluster

PROMPT = [5, 6, 7]
ASKED: list[dict[str, Any]] = [
    {"drafter": "oracle"},
    {"drafter": "ngram", "drafter_settings": {"depth": "9"}},
    {"drafter_settings": {"depth": "9"}},
    {"num_draft_tokens": 60},
]


async def refused(cluster: Cluster, **fields: Any) -> InvalidArgumentError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=20, **fields)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError), error
    return error


@pytest.mark.parametrize("fields", ASKED, ids=str)
@pytest.mark.parametrize("options", [{}, {"num_drafters": 0}, {"drafter": "none"}, {"drafter": "typo"}], ids=str)
async def test_a_drafter_rejected_for_new_requests_ends_no_running_answer(
    make_cluster: MakeCluster, options: dict[str, Any], fields: dict[str, Any]
) -> None:
    cluster = await make_cluster(**options)
    for drafter in cluster.drafters:
        drafter.faults.refuses_settings = True
    expected = cluster.target_ids(40, PROMPT)
    assert (await refused(cluster, **fields)).field.startswith("speculation.")
    usual: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True} | fields
    reply = await cluster.generate(resume_ids=expected[:10], **usual)
    assert reply.ids == expected[10:] and reply.start.drafter in ("", "model", "ngram")
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    if not any("settings" in name for name in fields):  # else they have not been tried: it is for a worker to say
        reply = await cluster.generate(system_fingerprint=info.system_fingerprint, **usual)
        assert reply.ids == expected, "broken before its first token"
    await cluster.until_idle()


async def test_a_worker_not_yet_connected_may_host_the_requested_drafter(make_cluster: MakeCluster) -> None:
    late = await make_cluster(draft_hellos=[{"drafters": ["late"]}])
    drafter = late.drafters[0]
    await drafter.kill()
    cluster = await make_cluster(num_drafters=0, wait_ready=False, draft=(drafter.address,))
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True, "drafter": "late"}
    reply = await cluster.generate(**fields)
    assert reply.ids == cluster.target_ids(40, PROMPT) and reply.finish.speculation.num_drafts == 0
    assert reply.start.drafter == ""
    await drafter.start()
    await cluster.until(lambda: all(worker.is_ready for worker in cluster.router.draft.workers))
    assert (await cluster.generate(**fields)).finish.speculation.num_drafts > 0
    assert (await refused(cluster, drafter="oracle")).limit == "must be one of: model, ngram, late"


async def test_a_rejected_worker_hosts_no_drafter(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{}, {"tokenizer_hash": "f" * 64}], wait_ready=False)
    good, strange = (worker.link for worker in cluster.router.draft.workers)
    await cluster.until(lambda: (good.state, strange.state) == (LinkState.READY, LinkState.REFUSED))
    assert (await refused(cluster, drafter="oracle")).limit == "must be one of: model, ngram"


@pytest.mark.parametrize("options", [{"num_drafters": 0}, {"drafter": "none"}], ids=str)
async def test_a_draft_length_for_no_drafter_is_refused(make_cluster: MakeCluster, options: dict[str, Any]) -> None:
    cluster = await make_cluster(**options)
    error = await refused(cluster, num_draft_tokens=4)
    assert (error.field, error.value) == ("speculation.num_draft_tokens", "4")
    assert "no draft workers" in error.limit or "no default drafter" in error.limit
