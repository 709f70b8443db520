"""Deadlines, cancellation, overload and bad input: typed, prompt, and freed down to the workers."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from typing import Any

import grpc
import pytest

from betoken.common.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    from_rpc_error,
)
from betoken.router import intake
from betoken.router.round.events import Event, Tokens
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2_grpc import GenerationServiceStub
from tests.clock import Clock
from tests.router.harness import CHAT_TEMPLATE, MakeCluster, byte_tokenizer_json, request, running_cluster

LONG: dict[str, Any] = {"prompt_ids": [9, 8, 7], "ignore_eos": True, "max_new_tokens": 2000}


@pytest.mark.parametrize("options", [{}, {"off": True}])
async def test_cancel_closes_the_sequence_on_both_workers(make_cluster: MakeCluster, options: dict[str, Any]) -> None:
    cluster = await make_cluster(step_s=0.002)
    call = cluster.stub.Generate(request(**LONG, **options))
    async for _ in call:
        if cluster.verifiers[0].num_open and (options or cluster.drafters[0].num_open):
            break
    call.cancel()
    await cluster.until_idle()
    assert cluster.verifiers[0].num_closed == len(cluster.verifiers[0].opened)
    assert cluster.drafters[0].num_closed == len(cluster.drafters[0].opened)


async def test_a_disconnected_client_is_a_cancellation(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.002)
    call = cluster.stub.Generate(request(**LONG))
    async for _ in call:
        break
    await cluster.channel.close()
    await cluster.until_idle()


async def test_the_deadline_ends_the_request_everywhere(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.005)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(**LONG, deadline_s=0.2)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.until_idle()


async def test_a_deadline_that_is_over_is_not_taken_for_none(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    late = await intake.prepare(request(), cluster.router, request_id="late", traceparent="", timeout_s=0.0)
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    with pytest.raises(DeadlineExceededError, match="time allowed"):
        await cluster.router.generate(late, emit, SpeculationCounts())
    assert not any(isinstance(event, Tokens) for event in events)


async def test_the_routers_own_limit_is_a_deadline_too(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.005, max_request_s=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(**LONG, deadline_s=None)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "time allowed" in failed.value.details()
    await cluster.until_idle()


async def test_a_client_that_does_not_read_stops_the_generation_not_the_others(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    call = cluster.stub.Generate(request(**LONG))
    await cluster.until(lambda: cluster.verifiers[0].num_open == 1)  # never read
    reply = await cluster.generate(max_new_tokens=40, ignore_eos=True)
    assert len(reply.ids) == 40
    call.cancel()
    await cluster.until_idle()


async def test_overload_is_refused_with_advice_before_any_work(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.005, max_concurrency=1, max_queue=1)
    running = asyncio.ensure_future(cluster.generate(**LONG))
    await cluster.until(lambda: cluster.router.admission.num_running == 1)
    queued = asyncio.ensure_future(cluster.generate(**LONG))
    await cluster.until(lambda: cluster.router.admission.num_waiting == 1)
    opened = len(cluster.verifiers[0].opened)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=5)
    error = from_rpc_error(failed.value)
    assert isinstance(error, ResourceExhaustedError) and error.retry_after_s and error.retry_after_s > 0
    assert len(cluster.verifiers[0].opened) == opened
    for call in (running, queued):
        call.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    await cluster.until_idle()
    assert cluster.router.admission.num_waiting == 0


async def test_a_client_that_leaves_retries_to_grpc_waits_as_long_as_advised(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(step_s=0.005, max_concurrency=1, max_queue=0)
    running = asyncio.ensure_future(cluster.generate(**LONG))
    await cluster.until(lambda: cluster.router.admission.num_running == 1)
    advise, advised = cluster.router.admission._retry_after_s, asyncio.Event()
    monkeypatch.setattr(cluster.router.admission, "_retry_after_s", lambda: (advised.set(), advise())[1])
    policy: dict[str, Any] = {"maxAttempts": 5, "retryableStatusCodes": ["RESOURCE_EXHAUSTED"]}
    policy |= {"initialBackoff": "30s", "maxBackoff": "30s", "backoffMultiplier": 1}
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
    async with grpc.aio.insecure_channel(cluster.address, [("grpc.service_config", config)]) as channel:
        # Before the policy's own pause is over.
        call = GenerationServiceStub(channel).Generate(request(max_new_tokens=5), timeout=25)
        await advised.wait()
        running.cancel()
        events = [event.WhichOneof("event") async for event in call]
    assert events[-1] == "finish"
    await cluster.until_idle()


async def test_requests_beyond_the_workers_capacity_wait(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"max_sequences": 2}])
    replies = await asyncio.gather(
        *(cluster.generate(prompt_ids=[i + 1], max_new_tokens=20, ignore_eos=True) for i in range(6))
    )
    assert all(len(reply.ids) == 20 for reply in replies)
    assert max(reply.finish.queue_ns for reply in replies) > 0


async def test_a_queued_request_goes_to_the_worker_that_has_room(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.002, verify_hellos=[{"max_sequences": 2}] * 2)
    most = [0, 0]

    async def watch() -> None:
        while True:
            most[:] = [max(*pair) for pair in zip(most, (worker.num_open for worker in cluster.verifiers), strict=True)]
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    options: dict[str, Any] = {"ignore_eos": True, "off": True}
    await asyncio.gather(*(cluster.generate(**options, max_new_tokens=5 + number) for number in range(30)))
    watching.cancel()
    assert most == [2, 2]  # a worker refuses what is more


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt_ids": []}, "prompt_ids"),
    ({"prompt_ids": [10_000]}, "prompt_ids"),
    ({"prompt_ids": [1] * 2048}, "prompt_ids"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"messages": [("tool", "x")]}, "messages"),
    ({"messages": []}, "messages"),
    ({"temperature": -1.0}, "sampling.temperature"),
    ({"temperature": math.nan}, "sampling.temperature"),
    ({"temperature": math.inf}, "sampling.temperature"),
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.5}, "sampling.top_p"),
    ({"min_p": -0.1}, "sampling.min_p"),
    ({"top_k": 10_000}, "sampling.top_k"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"repetition_penalty": 1e-38}, "sampling.repetition_penalty"),  # it would make logits infinite
    ({"presence_penalty": 3.0}, "sampling.presence_penalty"),
    ({"max_new_tokens": 0}, "sampling.max_new_tokens"),
    ({"max_new_tokens": 5000}, "sampling.max_new_tokens"),
    ({"max_new_tokens": 5, "min_new_tokens": 6}, "sampling.min_new_tokens"),
    ({"stop": [""]}, "sampling.stop"),
    ({"stop": ["x"] * 17}, "sampling.stop"),
    ({"stop": ["x" * 300]}, "sampling.stop"),
    ({"stop_token_ids": [10_000]}, "sampling.stop_token_ids"),
    ({"logprobs": 21}, "sampling.logprobs"),
    ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
    ({"prompt_logprobs": 0, "resume_prompt_logprobs": 3}, "resume_prompt_logprobs"),
    ({"resume_prompt_logprobs": 1}, "resume_prompt_logprobs"),
    ({"num_draft_tokens": 0}, "speculation.num_draft_tokens"),
    ({"num_draft_tokens": 17}, "speculation.num_draft_tokens"),
    ({"drafter": "oracle"}, "speculation.drafter.name"),
    ({"drafter_settings": {"depth": "9"}}, "speculation.drafter.settings"),
    ({"mode": 2}, "speculation.mode"),
    ({"mode": 3}, "speculation.mode"),
    ({"resume_ids": [10_000]}, "resume_ids"),
    ({"resume_ids": [1] * 6, "max_new_tokens": 5}, "resume_ids"),
    ({"resume_ids": [0, 1]}, "resume_ids"),
    ({"resume_ids": [1], "temperature": 1.0}, "sampling.seed"),
    ({"tenant": "t" * 129}, "tenant"),
    ({"system_fingerprint": "f" * 129}, "system_fingerprint"),
    ({"constraint": {"json_object": True}}, "constraint.json_object"),  # these workers have no model
    ({"constraint": {}}, "constraint"),
]


async def test_bad_input_names_the_field_and_every_other_stream_goes_on(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)
    other = asyncio.ensure_future(cluster.generate(prompt_ids=[4, 5], max_new_tokens=400, ignore_eos=True))
    for fields, field in BAD:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(**fields)
        error = from_rpc_error(failed.value)
        assert isinstance(error, InvalidArgumentError), (fields, error)
        assert error.field.startswith(field), (fields, error)
        assert error.value and error.limit, (fields, error)
        assert error.request_id
    assert (await other).ids == cluster.target_ids(400, [4, 5])
    await cluster.until_idle()


async def test_ids_that_stand_for_images_are_refused_and_others_are_served(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(verify_hellos=[{"media_token_ids": [7, 9]}])
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(prompt_ids=[4, 9, 5])
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == "prompt_ids.ids[1]" and error.value == "9"
    assert "stands for an image" in error.limit
    assert len((await cluster.generate(prompt_ids=[4, 8, 5], max_new_tokens=3)).ids) == 3


class CountingTokenizer(Tokenizer):
    """Counts the ids whose text was asked for."""

    num_pieces = 0

    def piece(self, token_id: int) -> str:
        self.num_pieces += 1
        return super().piece(token_id)


async def test_a_resumed_long_answer_does_not_block_others(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    whole = await cluster.generate(**LONG, temperature=0)
    tokenizer = cluster.router.tokenizer = CountingTokenizer(byte_tokenizer_json(), {}, CHAT_TEMPLATE, "test")
    resuming = asyncio.ensure_future(cluster.generate(**LONG, temperature=0, resume_ids=whole.ids[:1990]))
    most_in_a_turn = 0
    while not resuming.done():
        num_before = tokenizer.num_pieces
        await asyncio.sleep(0)
        most_in_a_turn = max(most_in_a_turn, tokenizer.num_pieces - num_before)
    assert (await resuming).ids == whole.ids[1990:]
    assert tokenizer.num_pieces > 1000 and most_in_a_turn <= 100


class HeldTokenizer(Tokenizer):
    """Processes large texts for a configurable time, and finds them too long for the model."""

    release = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= 1 << 15:
            return super().encode(text, add_special_tokens=add_special_tokens)
        assert self.release.wait(120)
        return [1] * 5000


async def test_texts_far_too_large_hold_up_no_other_prompt(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    tokenizer = cluster.router.tokenizer = HeldTokenizer(byte_tokenizer_json(), {}, CHAT_TEMPLATE, "test")
    large = "x" * ((1 << 18) + 1)
    inputs: list[dict[str, Any]] = [{"prompt": large}, {"messages": [("user", large)]}]
    calls = [asyncio.ensure_future(cluster.generate(**inputs[number % 2])) for number in range(40)]
    try:
        await asyncio.sleep(0.2)
        for fields in ({"messages": [("user", "hi")]}, {"prompt": "the " * 1100}):
            reply = await cluster.generate(**fields, max_new_tokens=4, ignore_eos=True, deadline_s=30)
            assert len(reply.ids) == 4
    finally:
        tokenizer.release.set()
        errors = await asyncio.gather(*calls, return_exceptions=True)
    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "difference",
    [{"weights_fingerprint": "b" * 64}, {"dtype": "bfloat16"}, {"numerics": "other"}, {"max_context": 64}],
    ids=lambda difference: next(iter(difference)),
)
async def test_an_answer_is_not_resumed_on_another_system(
    make_cluster: MakeCluster, difference: dict[str, Any]
) -> None:
    old, new = await make_cluster(), await make_cluster(verify_hellos=[difference])  # the same model id
    begun = await old.generate(prompt_ids=[4, 5], max_new_tokens=8, ignore_eos=True)
    info = await old.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)
    assert begun.start.system_fingerprint == info.system_fingerprint != ""
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await new.generate(prompt_ids=[4, 5], resume_ids=begun.ids, system_fingerprint=info.system_fingerprint)
    assert failed.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    served = (await new.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30)).system_fingerprint
    assert f"system_fingerprint {info.system_fingerprint!r}" in failed.value.details()
    assert repr(served) in failed.value.details()
    assert not new.verifiers[0].opened


async def test_an_answer_is_not_resumed_where_messages_become_another_prompt(tokenizer: Tokenizer) -> None:
    other = Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, f"Now. {CHAT_TEMPLATE}", "test")
    async with running_cluster(tokenizer) as old, running_cluster(other) as new:
        begun = await old.generate(messages=[("user", "hi")], max_new_tokens=2, ignore_eos=True)
        assert (await new.generate(messages=[("user", "hi")])).start.prompt_ids != begun.start.prompt_ids
        with pytest.raises(grpc.aio.AioRpcError, match="is not served here"):
            await new.generate(messages=[("user", "hi")], system_fingerprint=begun.start.system_fingerprint)


async def test_another_model_is_not_found(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(model="other")
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    assert "'fake'" in failed.value.details()


def spoilt(text: str, **fields: Any) -> bytes:
    """A request whose bytes for `text` are not UTF-8."""
    return request(**fields).SerializeToString().replace(text.encode(), b"\xff" * len(text))


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (spoilt("abc", prompt="abc"), "prompt"),
        (spoilt("abc", messages=[("user", "x"), ("user", "abc")]), "messages.messages[1].content"),
        (spoilt("abc", stop=["x", "abc"]), "sampling.stop[1]"),
        (spoilt("abc", prompt="x", temperature=0.5, tenant="abc"), "tenant"),
        (b"\x0a\x7fshort", "request"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "request"),
        pytest.param(b"\x18\x00" * 100_000 + b"\x0a\x01\xff", "request", id="too-many-fields-to-look-through"),
    ],
)
async def test_bytes_that_are_no_request_are_refused(make_cluster: MakeCluster, data: bytes, field: str) -> None:
    cluster = await make_cluster()
    call = cluster.channel.unary_stream("/betoken.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in call(data, timeout=30):
            pass
    error = from_rpc_error(failed.value)
    assert isinstance(error, InvalidArgumentError) and error.field == field
    assert len((await cluster.generate(max_new_tokens=3)).ids) == 3


async def test_without_a_verify_worker_the_answer_is_unavailable(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(wait_ready=False, ready_timeout_s=0.1, verify=("127.0.0.1:9",))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=3)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "127.0.0.1:9" in failed.value.details()


async def test_a_request_that_waited_in_vain_is_reported_which_workers_are_away(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(num_drafters=0, queue_timeout_s=0.2)
    await cluster.generate(max_new_tokens=3)
    await cluster.verifiers[0].kill()
    await cluster.until(lambda: not cluster.router.verify.capacity)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=3)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"{cluster.verifiers[0].address}: connecting" in failed.value.details()


async def test_the_reason_of_a_missing_worker_comes_before_the_client_s_deadline(
    make_cluster: MakeCluster, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(wait_ready=False, ready_timeout_s=1000.0, verify=("127.0.0.1:9",))
    wait_ready, waits_s = cluster.router.verify.wait_ready, []
    monkeypatch.setattr(
        cluster.router.verify, "wait_ready", lambda wait_s: (waits_s.append(wait_s), wait_ready(wait_s))[1]
    )
    for ask in (
        lambda: cluster.generate(60.0),
        lambda: cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60.0),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await clock.hurry(ask())
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1:9" in failed.value.details()
    assert len(waits_s) == 2 and max(waits_s) < 57.0


async def test_a_queued_request_is_reported_the_reason_before_its_deadline(
    make_cluster: MakeCluster, clock: Clock
) -> None:
    hellos = [{"max_sequences": 1}]
    cluster = await make_cluster(num_drafters=0, verify_hellos=hellos, step_s=0.005, queue_timeout_s=1000.0)
    running = asyncio.ensure_future(cluster.generate(**LONG, deadline_s=1000.0))
    await cluster.until(lambda: cluster.verifiers[0].num_open == 1)
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await clock.hurry(cluster.generate(60.0, max_new_tokens=3))
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "betoken-retry-after-ms" in dict(full.value.trailing_metadata())
    running.cancel()
    await cluster.verifiers[0].kill()
    await cluster.until(lambda: not cluster.router.verify.capacity)
    with pytest.raises(grpc.aio.AioRpcError) as away:
        await clock.hurry(cluster.generate(60.0, max_new_tokens=3))
    assert away.value.code() is grpc.StatusCode.UNAVAILABLE
    assert f"{cluster.verifiers[0].address}: connecting" in away.value.details()


async def test_a_draining_router_refuses_and_lets_the_rest_finish(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.001)
    running = asyncio.ensure_future(cluster.generate(prompt_ids=[4, 5], max_new_tokens=100, ignore_eos=True))
    await cluster.until(lambda: cluster.router.admission.num_running == 1)
    draining = asyncio.ensure_future(cluster.router.drain(10.0))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=3)
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len((await running).ids) == 100
    await draining


async def test_a_request_too_large_for_a_link_ends_alone(make_cluster: MakeCluster) -> None:
    """gRPC would break the link, and with it every sequence on it."""
    cluster = await make_cluster(verify_hellos=[{"max_context": 1 << 16}], max_message_bytes=1 << 16, step_s=0.001)
    other = asyncio.ensure_future(cluster.generate(prompt_ids=[9, 8, 7], ignore_eos=True, max_new_tokens=200))
    await cluster.until(lambda: cluster.verifiers[0].num_open > 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(prompt_ids=[200] * 40_000, max_new_tokens=2)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await other).finish.speculation.num_failovers == 0
    await cluster.until_idle()
