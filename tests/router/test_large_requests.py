"""No request, however large, makes the router grow by much; what is too large is refused and names its field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError, from_rpc_error
from betoken.router.policy.byte_budget import ByteBudget
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2_grpc import GenerationServiceStub
from tests.router.harness import CHAT_TEMPLATE, MakeCluster, byte_tokenizer_json, request
from tests.router.memory import Memory
from tests.router.process import serving

_MIB = 1 << 20
MOST_GROWTH = 64 * _MIB
SEND_ALL = [("grpc.max_send_message_length", -1)]


def chat(content: str) -> pb.ChatMessages:
    return pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=content)])


LARGE: dict[str, tuple[str, Callable[[], Any]]] = {
    "prompt-60-mib": ("Generate", lambda: pb.GenerateRequest(prompt="\nx" * (30 * _MIB))),
    "prompt": ("Generate", lambda: pb.GenerateRequest(prompt="\nx" * (2 * _MIB))),
    "messages": ("Generate", lambda: pb.GenerateRequest(messages=chat("\nx" * (2 * _MIB)))),
    "many-messages": ("Generate", lambda: pb.GenerateRequest(messages={"messages": [pb.ChatMessage()] * (4 * _MIB)})),
    "stop": ("Generate", lambda: pb.GenerateRequest(prompt="x", sampling={"stop": [""] * (4 * _MIB)})),
    "stop-string": ("Generate", lambda: pb.GenerateRequest(prompt="x", sampling={"stop": ["\nx" * (2 * _MIB)]})),
    "prompt-ids": ("Generate", lambda: pb.GenerateRequest(prompt_ids={"ids": [1] * (4 * _MIB)})),
    "resume-ids": ("Generate", lambda: pb.GenerateRequest(prompt="x", resume_ids=[1] * (4 * _MIB))),
    "tokenize": ("Tokenize", lambda: pb.TokenizeRequest(prompt="\nx" * (2 * _MIB))),
    "tokenize-messages": ("Tokenize", lambda: pb.TokenizeRequest(messages=chat("\nx" * (2 * _MIB)))),
    "detokenize": ("Detokenize", lambda: pb.DetokenizeRequest(ids=[1] * (4 * _MIB))),
}


async def call(stub: Any, method: str, message: Any) -> None:
    answer = getattr(stub, method)(message, timeout=120)
    if method != "Generate":
        await answer
        return
    async for _ in answer:
        pass


async def test_no_request_makes_the_router_grow_by_much(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        serving(tmp_path, tokenizer) as (process, address),
        grpc.aio.insecure_channel(address, SEND_ALL) as channel,
    ):
        stub = GenerationServiceStub(channel)
        await call(stub, "Generate", request(prompt="x", max_new_tokens=4))
        for name, (method, make) in LARGE.items():
            message, memory = make(), Memory(process.pid)
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await call(stub, method, message)
            error = from_rpc_error(failed.value)
            assert isinstance(error, InvalidArgumentError if message.ByteSize() < 9 * _MIB else ResourceExhaustedError)
            assert memory.peak_growth < MOST_GROWTH, name


async def test_memory_that_large_requests_took_comes_back(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with (
        serving(tmp_path, tokenizer) as (process, address),
        grpc.aio.insecure_channel(address, SEND_ALL) as channel,
    ):
        stub = GenerationServiceStub(channel)
        await call(stub, "Generate", request(prompt="x", max_new_tokens=4))
        memory, text = Memory(process.pid), "the other one " * 500_000
        for _ in range(3):
            asking = [call(stub, "Generate", pb.GenerateRequest(prompt=text)) for _ in range(8)]
            errors = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors)
        assert memory.peak_growth > MOST_GROWTH
        async with asyncio.timeout(30):
            while memory.growth > memory.peak_growth // 3:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def test_a_text_beyond_its_limit_is_refused_before_it_is_tokenized(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_prompt_bytes=1024)
    fits, is_too_large = "é" * 512, "é" * 513  # of two bytes each
    for fields, field in (({"prompt": is_too_large}, "prompt"), ({"messages": [("user", is_too_large)]}, "messages")):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(**fields)
        error = from_rpc_error(failed.value)
        assert isinstance(error, InvalidArgumentError) and error.field == field and "1024" in error.limit
    assert (await cluster.generate(prompt=fits, max_new_tokens=2, ignore_eos=True)).ids
    await cluster.until_idle()


async def test_a_chat_is_measured_as_it_is_rendered(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(max_prompt_bytes=1024)
    cluster.router.tokenizer = Tokenizer(byte_tokenizer_json(), {}, CHAT_TEMPLATE + "{{ 'x' * 2000 }}", "test")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(messages=[("user", "hi")])
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == "messages" and "rendered" in error.value


async def test_a_text_that_fits_the_context_is_tokenized_whole(make_cluster: MakeCluster) -> None:
    """Though it is longer than any part."""
    cluster = await make_cluster(verify_hellos=[{"max_context": 150_000}])
    text = "the " * 35_000
    ids = cluster.tokenizer.encode(text)
    reply = await cluster.generate(prompt=text, max_new_tokens=2, ignore_eos=True)
    assert list(reply.start.prompt_ids) == ids
    too_long = "ab" * 200_000
    with pytest.raises(grpc.aio.AioRpcError, match="must be at most 149999"):
        await cluster.generate(prompt=too_long)


async def test_requests_that_wait_hold_no_more_bytes_than_allowed(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(
        max_concurrency=1, step_s=0.005, max_waiting_bytes=1 << 16, verify_hellos=[{"max_context": 20_000}]
    )
    budget = cluster.router.waiting_bytes
    large: dict[str, Any] = {"prompt_ids": [200] * 9000, "max_new_tokens": 2}  # 18 KB, and 36 KB as numbers
    running = asyncio.ensure_future(cluster.generate(prompt_ids=[9], max_new_tokens=2000, ignore_eos=True))
    await cluster.until(lambda: cluster.router.admission.num_running == 1)
    waiting = asyncio.ensure_future(cluster.generate(**large))
    await cluster.until(lambda: cluster.router.admission.num_waiting == 1)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(**large)
    error = from_rpc_error(failed.value)
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_s
    running.cancel()
    assert len((await waiting).ids) == 2
    await cluster.until(lambda: budget.num_bytes == 0)
    assert len((await cluster.generate(**large)).ids) == 2
    await cluster.until_idle()


def test_one_request_may_be_larger_than_the_bytes_of_all() -> None:
    budget = ByteBudget(10)
    with budget.hold(25), pytest.raises(ResourceExhaustedError, match="requests that wait hold"):
        budget.hold(1)
    with budget.hold(5) as held, budget.hold(5):
        with pytest.raises(ResourceExhaustedError, match="requests that wait hold"):
            held.add(1)
        held.release()
        assert budget.num_bytes == 5
    assert budget.num_bytes == 0
