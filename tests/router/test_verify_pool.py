"""Verify workers that serve together, and the selected one: identity, limits, drains, silent and full workers."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from betoken.v1 import generation_pb2 as pb
from betoken.v1.types_pb2 import (
    Load,
)
from betoken.v1.verify_pb2 import VerifyLinkResponse
from tests.router.harness import (
    OPTIONS,
    PROMPT,
    Cluster,
    MakeCluster,
    generate_and,
    generate_while_one_drains,
)


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


async def test_a_verifier_that_other_routers_have_filled_is_left_for_one_with_room(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_verifiers=2)
    full = cluster.verifiers[0]
    full.faults.open_error_code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    for _ in range(2):
        reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
        assert reply.ids == cluster.target_ids(30, PROMPT)
    assert full.opened
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


async def test_padded_vocabularies_are_tolerated(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(draft_hellos=[{"vocab_size": 4096}])
    reply = await cluster.generate(**OPTIONS, max_new_tokens=30)
    assert reply.ids == cluster.target_ids(30, PROMPT)
    assert reply.finish.speculation.num_accepted_tokens > 0
