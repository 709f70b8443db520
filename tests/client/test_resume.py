"""Answers that break are resumed: from their ids, within the retries and the deadline, with typed errors."""

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from betoken.client import (
    AsyncClient,
    BetokenError,
    Client,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)
from betoken.common.errors import NotFoundError
from tests.client.runners import FAST, swallowed


async def test_an_answer_resumes_where_it_broke(router, script, runner) -> None:
    start = script.start(seed=42, system_fingerprint="f")
    router.will(start, script.tokens("ab", 5, 6), grpc.StatusCode.UNAVAILABLE)
    router.will(grpc.StatusCode.UNAVAILABLE)  # an attempt, but no resumption
    router.will(script.start(seed=42), script.tokens("c", 7), script.tokens("", 8), script.EndEarly())
    router.will(script.start(seed=42), script.tokens("d"), script.finish(5))
    answer = await runner.call(router.address, "complete", "hi", model="m", temperature=0.5, resume_ids=[4], tenant="t")
    assert (answer.text, answer.output_ids, answer.num_resumes) == ("abcd", (5, 6, 7, 8), 2)
    first, second, third, fourth = router.requests
    assert answer.system_fingerprint == "f" and not first.system_fingerprint
    assert (first.model, first.prompt, list(first.resume_ids)) == ("m", "hi", [4])
    assert not first.sampling.HasField("seed")
    for request, received in ((second, [4, 5, 6]), (third, [4, 5, 6]), (fourth, [4, 5, 6, 7, 8])):
        assert list(request.prompt_ids.ids) == [1, 2, 3] and request.WhichOneof("input") == "prompt_ids"
        assert request.sampling.seed == 42 and request.sampling.temperature == 0.5
        assert (request.tenant, request.system_fingerprint) == ("t", "f")
        assert not request.model  # another router may know the same system by another name
        assert list(request.resume_ids) == received


async def test_a_break_before_the_first_message_repeats_the_request(router, script, runner) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), script.tokens("a", 5), script.finish(1))
    answer = await runner.call(router.address, "complete", "hi")
    assert answer.text == "a" and answer.num_resumes == 0
    assert router.requests[0] == router.requests[1]


async def test_a_resumed_request_has_ids_and_no_text(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), script.finish(1))
    assert (await runner.call(router.address, "complete", "hi", add_special_tokens=False)).text == "a"
    first, second = router.requests
    assert first.HasField("add_special_tokens") and not second.HasField("add_special_tokens")
    assert second.WhichOneof("input") == "prompt_ids"


async def test_an_unrequested_cancellation_is_a_lost_stream(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.CANCELLED)
    router.will(script.start(), script.tokens("b", 6), script.finish(2))
    assert (await runner.call(router.address, "complete", "hi")).text == "ab"


@asynccontextmanager
async def _proxy(address: str, last_frame: Callable[[bytes], bytes]) -> AsyncIterator[str]:
    """Before `address`; `last_frame`(stream id) ends its first connection, in place of the third DATA frame."""
    num_data = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_data
        from_router, to_router = await asyncio.open_connection(*address.split(":"))
        pump = asyncio.create_task(_pump(reader, to_router))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while num_data != 3:
                header = await from_router.readexactly(9)
                body = await from_router.readexactly(int.from_bytes(header[:3]))
                num_data += header[3] == 0
                if num_data == 3:
                    await asyncio.sleep(0.2)  # gRPC drops what the client has not taken yet
                writer.write(last_frame(header[5:]) if num_data == 3 else header + body)
                await writer.drain()
        num_data += 1
        pump.cancel()
        to_router.close()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


@pytest.mark.parametrize(
    "last_frame",
    [lambda stream: b"\0\0\4\3\0" + stream + b"\0\0\0\2", lambda stream: b"\0\0\0\0\1" + stream],
    ids=["reset", "ended"],
)
async def test_an_answer_that_a_proxy_cut_off_is_resumed(router, script, runner, last_frame) -> None:
    """Proxies that lose their router say so by ending the stream without a status, which gRPC calls INTERNAL."""
    router.will(script.start(), script.tokens("a", 5), script.tokens("b", 6), script.Hang())
    router.will(script.start(), script.tokens("b", 6), script.finish(2))
    async with _proxy(router.address, last_frame) as address:
        done = await runner.call(address, "complete", "hi", timeout_s=30.0)
    assert (done.text, done.output_ids, done.num_resumes) == ("ab", (5, 6), 1)


async def test_retries_in_a_row_are_bounded_and_progress_starts_anew(router, script, runner) -> None:
    policy = RetryPolicy(max_retries=1, initial_backoff_s=0.001)
    router.will(grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(UnavailableError, match="as scripted"):
        await runner.call(router.address, "complete", "hi", retry=policy)


async def test_an_error_after_the_last_message_of_an_answer_is_ignored(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), script.finish(1), grpc.StatusCode.UNAVAILABLE)
    assert (await runner.call(router.address, "complete", "hi")).text == "a"


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError("sampling.temperature", -1, "must be 0 or more"), NotFoundError("no"), InternalError("x")],
    ids=lambda error: type(error).__name__,
)
async def test_other_errors_are_final_and_typed(router, script, runner, error) -> None:
    router.will(script.start(), error)
    with pytest.raises(type(error), match=f"^{re.escape(str(error))}$") as caught:
        await runner.call(router.address, "complete", "hi")
    if isinstance(error, InvalidArgumentError):
        assert (caught.value.field, caught.value.value) == ("sampling.temperature", "-1")


async def test_overload_is_retried_only_if_asked(router, script, runner) -> None:
    router.will(ResourceExhaustedError("full", retry_after_s=0.05))
    with pytest.raises(ResourceExhaustedError, match="full") as caught:
        await runner.call(router.address, "complete", "hi")
    assert caught.value.retry_after_s == 0.05
    router.will(ResourceExhaustedError("full", retry_after_s=0.05))
    router.will(script.start(), script.finish())
    policy = RetryPolicy(retry_when_exhausted=True, initial_backoff_s=0.001)
    before_s = time.time()
    await runner.call(router.address, "complete", "hi", retry=policy)
    assert time.time() - before_s >= 0.05


async def test_the_deadline_is_one_over_all_attempts(router, script, runner) -> None:
    router.will(script.start(), script.Hang())
    with pytest.raises(DeadlineExceededError, match="(?i)deadline|time allowed") as caught:
        # Long enough to reach the router on a machine that pauses.
        await runner.call(router.address, "complete", "hi", timeout_s=2.0)
    assert caught.value.request_id == "r1"  # for the router's log: the status of a deadline is gRPC's own
    assert caught.value.partial.output_ids == ()
    assert await asyncio.to_thread(router.cancelled.wait, 30)


@pytest.mark.parametrize("end", ["deadline", "fault", "outage"])
async def test_an_error_keeps_the_partial_answer(router, script, runner, end) -> None:
    last = {"deadline": script.Hang(), "fault": InternalError("bug"), "outage": grpc.StatusCode.UNAVAILABLE}[end]
    words = {"deadline": "(?i)deadline|time allowed", "fault": "bug", "outage": "as scripted"}[end]
    router.will(script.start(seed=9, system_fingerprint="f"), script.tokens("ab", 5, 6), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(seed=9, system_fingerprint="f"), script.tokens("c", 7), last)
    if end == "outage":
        router.will(grpc.StatusCode.UNAVAILABLE)
    policy = RetryPolicy(max_retries=1, initial_backoff_s=0.001)
    with pytest.raises(BetokenError, match=words) as caught:
        await runner.call(router.address, "complete", "hi", timeout_s=2.0, retry=policy)
    partial = caught.value.partial
    assert (str(partial), partial.output_ids, partial.prompt_ids) == ("abc", (5, 6, 7), (1, 2, 3))
    assert (partial.seed, partial.model, partial.system_fingerprint) == (9, "tiny", "f")
    assert caught.value.request_id == "r1"


async def test_an_error_before_the_first_message_has_no_part_of_an_answer(router, runner) -> None:
    router.will(InternalError("bug"))
    with pytest.raises(InternalError, match="bug") as caught:
        await runner.call(router.address, "complete", "hi")
    assert caught.value.partial is None


async def test_errors_name_the_last_stream_that_the_router_began(router, script, runner) -> None:
    router.will(script.start(request_id="r1"), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(request_id="r2"), grpc.StatusCode.UNAVAILABLE)
    router.will(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(UnavailableError, match="as scripted") as caught:
        await runner.call(router.address, "complete", "hi", retry=RetryPolicy(max_retries=2, initial_backoff_s=0.001))
    assert caught.value.request_id == "r2"


async def test_the_deadline_counts_from_the_iteration(router, script, clock) -> None:
    router.will(script.start(), script.tokens("a", 5), script.finish(1))
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    async with AsyncClient(router.address) as client:
        with Client(router.address) as blocking:
            answer, blocking_answer = (each.generate("hi", timeout_s=30.0) for each in (client, blocking))
            clock.advance(31.0)  # as behind other answers that are read first
            assert (await answer.result()).text == "a"
            assert (await asyncio.to_thread(blocking_answer.result)).text == "b"


async def test_answer_messages_out_of_order_are_rejected(router, script, runner) -> None:
    router.will(script.tokens("a", 5))
    with pytest.raises(InternalError, match="out of order"):
        await runner.call(router.address, "complete", "hi")


async def test_a_message_too_large_is_not_retried_as_overload(router, runner) -> None:
    """At either end, and asking again cannot help."""
    retry = RetryPolicy(max_retries=2, initial_backoff_s=0.001, retry_when_exhausted=True)
    for num_bytes, most in ((5 << 20, 4 << 20), (65 << 20, 64 << 20)):
        with pytest.raises(InvalidArgumentError, match=f"^message = .*: must be at most {most} bytes$") as caught:
            await runner.call(router.address, "tokenize", "x" * num_bytes, retry=retry)
        assert int(caught.value.value) >= num_bytes
    assert not router.requests


async def test_a_lost_stream_is_resumed_in_a_task_that_has_swallowed_a_cancellation(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.CANCELLED)
    router.will(script.start(), script.tokens("b", 6), script.finish(2))
    await swallowed()
    async with AsyncClient(router.address, retry=FAST) as client:
        assert (await client.complete("hi")).text == "ab"
