"""Several answers of one request: each equals the answer of its seed alone, and their prompt is computed once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.common.seeds import derived_seed
from betoken.router.parallel_sampling import run_together
from betoken.testing.fake_model import FakeModel
from tests.router.harness import Cluster, MakeCluster, Reply, add_event, request

FIELDS: dict[str, Any] = {"prompt_ids": [5, 6, 7], "max_new_tokens": 30, "temperature": 0.8, "seed": 7}


async def answers(cluster: Cluster, n: int, **fields: Any) -> list[Reply]:
    replies = [Reply() for _ in range(n)]
    async for event in cluster.stub.Generate(request(**FIELDS | fields, n=n), timeout=30):
        add_event(replies[event.answer], event)
    return replies


async def test_each_answer_is_that_of_its_own_seed(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    replies = await answers(cluster, 4)
    assert replies[0].start.seed == 7
    assert [reply.start.seed for reply in replies[1:]] == [derived_seed(7, index) for index in (1, 2, 3)]
    assert len({reply.start.request_id for reply in replies}) == len({tuple(reply.ids) for reply in replies}) == 4
    for reply in replies:
        alone = await cluster.generate(**FIELDS | {"seed": reply.start.seed})
        assert (alone.ids, alone.text) == (reply.ids, reply.text) and reply.finish.usage.output_tokens == len(reply.ids)
    await cluster.until_idle()


async def test_further_answers_are_opened_once_the_prompt_is_computed(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.05)
    call = cluster.stub.Generate(request(**FIELDS, n=5), timeout=30)
    async for event in call:
        if event.WhichOneof("event") == "tokens":
            break
        assert len(cluster.verifiers[0].opened) <= 1
    await cluster.until(lambda: len(cluster.verifiers[0].opened) == 5)
    call.cancel()
    await cluster.until_idle()


@pytest.mark.parametrize(("fields", "field"), [({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": 2, "resume_ids": [5]}, "n")])
async def test_too_many_answers_and_resumed_ones_are_rejected(
    make_cluster: MakeCluster, fields: dict[str, Any], field: str
) -> None:
    cluster = await make_cluster()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(**FIELDS | fields)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == field


async def test_more_answers_than_streams_and_queue_hold_are_rejected(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_concurrency=2, max_queue=1)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await answers(cluster, 6)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == "n"


async def test_an_answer_that_finds_no_place_ends_the_others_and_frees_them(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_concurrency=2, max_queue=1, step_s=0.05, model=FakeModel(vocab_size=1000))
    other = asyncio.create_task(cluster.generate(**FIELDS))
    await cluster.until(lambda: bool(cluster.verifiers[0].opened))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await answers(cluster, 3)
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len((await other).ids) == FIELDS["max_new_tokens"]
    await cluster.until_idle()


async def test_the_first_error_of_parallel_answers_cancels_the_others_and_is_raised_unwrapped() -> None:
    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await run_together([endless, failing])
    assert cancelled.is_set()
