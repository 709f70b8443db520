"""Both clients against a scripted router; every case runs through each."""

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from betoken.client import (
    AsyncClient,
    BetokenError,
    Client,
    DeadlineExceededError,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    RetryPolicy,
    TokenOrigin,
    UnavailableError,
)
from betoken.client.channel import channel_options
from betoken.common.errors import NotFoundError
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2

PATIENT = RetryPolicy(initial_backoff_s=120.0, max_backoff_s=120.0)
FAST = RetryPolicy(initial_backoff_s=0.001, max_backoff_s=0.002)


class SyncRunner:
    """Drives the blocking client off the test's event loop."""

    async def pieces(self, address: str, prompt: Any, stop_after: int | None = None, **options: Any) -> list[Any]:
        return await asyncio.to_thread(self._pieces, address, prompt, stop_after, options)

    def _pieces(self, address: str, prompt: Any, stop_after: int | None, options: dict[str, Any]) -> list[Any]:
        pieces = []
        with Client(address, retry=options.pop("retry", FAST)) as client:
            generation = client.generate(prompt, **options)
            for piece in generation:
                pieces.append(piece)
                if len(pieces) == stop_after:
                    break
            if stop_after is not None:
                return pieces  # the answer object is still alive here: leaving the loop alone must have cancelled
        return pieces

    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        def run() -> Any:
            own = {"retry": options.pop("retry", FAST)} | options.pop("client_options", {})
            with Client(address, **own) as client:
                return getattr(client, method)(*args, **options)

        return await asyncio.to_thread(run)


class AsyncRunner:
    """Drives the asyncio client."""

    async def pieces(self, address: str, prompt: Any, stop_after: int | None = None, **options: Any) -> list[Any]:
        pieces = []
        async with AsyncClient(address, retry=options.pop("retry", FAST)) as client:
            generation = client.generate(prompt, **options)
            async for piece in generation:
                pieces.append(piece)
                if len(pieces) == stop_after:
                    break
            return pieces

    async def call(self, address: str, method: str, *args: Any, **options: Any) -> Any:
        own = {"retry": options.pop("retry", FAST)} | options.pop("client_options", {})
        async with AsyncClient(address, **own) as client:
            return await getattr(client, method)(*args, **options)


@pytest.fixture(params=[SyncRunner, AsyncRunner], ids=["sync", "async"])
def runner(request: pytest.FixtureRequest) -> Any:
    return request.param()


async def test_pieces_print_as_text_and_carry_tokens(router, script, runner) -> None:
    accepted = {"origin": types_pb2.TOKEN_ORIGIN_ACCEPTED, "source": "ngram"}
    router.will(
        script.start(),
        script.tokens("añ", 5, 6, **accepted),
        script.tokens("cd", 7, origin=types_pb2.TOKEN_ORIGIN_RECOVERED),
        script.tokens("!"),
        script.finish(3),
    )
    pieces = await runner.pieces(router.address, "hi")
    assert [str(piece) for piece in pieces] == ["añ", "cd", "!"]
    assert [token.text for token in pieces[0].tokens] == ["a", "ñ"]
    assert [token.id for piece in pieces for token in piece.tokens] == [5, 6, 7]
    assert pieces[0].tokens[0].source == "ngram" and pieces[0].tokens[0].provenance == "ngram"
    assert pieces[1].tokens[0].origin is TokenOrigin.RECOVERED and pieces[1].tokens[0].source is None
    assert pieces[1].tokens[0].provenance == "recovered"


async def test_complete_gives_the_whole_answer(router, script, runner) -> None:
    stats = pb.SpeculationStats(
        num_drafts=2,
        num_draft_tokens=8,
        num_accepted_tokens=2,
        num_accepted_per_position=[2, 0],
        num_drafted_per_position=[4, 4],
        num_verify_forwards=2,
        num_emitted_tokens=4,
        round_ns=2_000_000,
        num_rounds=3,
        first_draft_forward_ns=500_000,
    )
    logprobs = types_pb2.TokenLogprobs(logprob=-0.5, top_ids=[9, 8], top_logprobs=[-0.5, -1.5])
    message = pb.GenerateTokens(text="x", tokens=[pb.GeneratedToken(id=9, origin=99, logprobs=logprobs)])
    router.will(
        script.start(seed=11),
        pb.GenerateResponse(tokens=message),
        script.finish(1, pb.FINISH_REASON_STOP, stop="\n", speculation=stats, duration_ns=5_000_000),
    )
    answer = await runner.call(router.address, "complete", "hi", logprobs=2)
    assert (str(answer), answer.output_ids, answer.seed, answer.prompt_ids) == ("x", (9,), 11, (1, 2, 3))
    assert (answer.finish_reason, answer.stop, answer.usage.output_tokens) == (FinishReason.STOP, "\n", 1)
    assert answer.tokens[0].logprobs.top == ((9, -0.5), (8, -1.5))
    assert answer.tokens[0].origin is TokenOrigin.UNKNOWN
    assert answer.speculation.acceptance_rate == 0.25 and answer.speculation.block_efficiency == 2
    assert answer.speculation.acceptance_per_position == (0.5, 0.0)
    assert answer.speculation.num_rounds == 3
    assert answer.speculation.first_draft_forward_s == pytest.approx(0.0005)
    assert answer.speculation.round_s == pytest.approx(0.002) and answer.duration_s == pytest.approx(0.005)


async def test_the_prompts_logprobs_come_once_over_as_many_streams_as_it_takes(router, script, runner) -> None:
    start = script.start(seed=4, prompt_ids=[5, 6, 7, 8])
    router.will(start, script.of_prompt(1, -0.5), script.of_prompt(2, -1.5), grpc.StatusCode.UNAVAILABLE)
    router.will(start, script.of_prompt(3, -2.5), script.tokens("a", 9), grpc.StatusCode.UNAVAILABLE)
    router.will(start, script.tokens("b", 9), script.finish(2))
    answer = await runner.call(router.address, "complete", "hi", prompt_logprobs=1)
    assert answer.prompt_logprobs[0] is None and answer.output_ids == (9, 9)
    assert [one.logprob for one in answer.prompt_logprobs[1:]] == [-0.5, -1.5, -2.5]
    assert [one.top for one in answer.prompt_logprobs[1:]] == [((position, -0.25),) for position in (1, 2, 3)]
    assert [request.resume_prompt_logprobs for request in router.requests] == [0, 2, 3]
    assert [list(request.resume_ids) for request in router.requests] == [[], [], [9]]


async def test_prompt_logprobs_with_a_gap_are_a_routers_fault(router, script, runner) -> None:
    router.will(script.start(prompt_ids=[5, 6, 7]), script.of_prompt(2, -0.5))
    with pytest.raises(InternalError, match="position 2 of the prompt out of order"):
        await runner.call(router.address, "complete", "hi", prompt_logprobs=1)


async def test_prompt_logprobs_are_absent_unless_requested(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 9), script.finish(1))
    assert (await runner.call(router.address, "complete", "hi")).prompt_logprobs == ()


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


async def test_a_resumed_request_is_of_ids_and_says_nothing_of_text(router, script, runner) -> None:
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


async def test_a_fault_after_the_last_message_does_not_matter(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), script.finish(1), grpc.StatusCode.UNAVAILABLE)
    assert (await runner.call(router.address, "complete", "hi")).text == "a"


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError("sampling.temperature", -1, "must be 0 or more"), NotFoundError("no"), InternalError("x")],
    ids=lambda error: type(error).__name__,
)
async def test_other_errors_are_final_and_typed(router, script, runner, error) -> None:
    router.will(script.start(), error)
    with pytest.raises(type(error)) as caught:
        await runner.call(router.address, "complete", "hi")
    assert str(caught.value) == str(error)
    if isinstance(error, InvalidArgumentError):
        assert (caught.value.field, caught.value.value) == ("sampling.temperature", "-1")


async def test_overload_is_retried_only_if_asked(router, script, runner) -> None:
    router.will(ResourceExhaustedError("full", retry_after_s=0.05))
    with pytest.raises(ResourceExhaustedError) as caught:
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
    with pytest.raises(DeadlineExceededError) as caught:
        # Long enough to reach the router on a machine that pauses.
        await runner.call(router.address, "complete", "hi", timeout_s=2.0)
    assert caught.value.request_id == "r1"  # for the router's log: the status of a deadline is gRPC's own
    assert caught.value.partial.output_ids == ()
    assert await asyncio.to_thread(router.cancelled.wait, 30)


@pytest.mark.parametrize("end", ["deadline", "fault", "outage"])
async def test_an_error_keeps_what_came_of_the_answer(router, script, runner, end) -> None:
    last = {"deadline": script.Hang(), "fault": InternalError("bug"), "outage": grpc.StatusCode.UNAVAILABLE}[end]
    router.will(script.start(seed=9, system_fingerprint="f"), script.tokens("ab", 5, 6), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(seed=9, system_fingerprint="f"), script.tokens("c", 7), last)
    if end == "outage":
        router.will(grpc.StatusCode.UNAVAILABLE)
    policy = RetryPolicy(max_retries=1, initial_backoff_s=0.001)
    with pytest.raises(BetokenError) as caught:
        await runner.call(router.address, "complete", "hi", timeout_s=2.0, retry=policy)
    partial = caught.value.partial
    assert (str(partial), partial.output_ids, partial.prompt_ids) == ("abc", (5, 6, 7), (1, 2, 3))
    assert (partial.seed, partial.model, partial.system_fingerprint) == (9, "tiny", "f")
    assert caught.value.request_id == "r1"


async def test_an_error_before_the_first_message_has_no_part_of_an_answer(router, runner) -> None:
    router.will(InternalError("bug"))
    with pytest.raises(InternalError) as caught:
        await runner.call(router.address, "complete", "hi")
    assert caught.value.partial is None


async def test_errors_name_the_last_stream_that_the_router_began(router, script, runner) -> None:
    router.will(script.start(request_id="r1"), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(request_id="r2"), grpc.StatusCode.UNAVAILABLE)
    router.will(grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(UnavailableError) as caught:
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


async def test_leaving_the_loop_cancels_the_call(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    pieces = await runner.pieces(router.address, "hi", stop_after=1)
    assert [str(piece) for piece in pieces] == ["a"]
    gc.collect()
    assert await asyncio.to_thread(router.cancelled.wait, 30)


async def test_a_result_after_leaving_the_loop_says_so(router, script) -> None:
    for _ in range(2):
        router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        with Client(router.address) as blocking:
            answer, blocking_answer = (each.generate("hi") for each in (client, blocking))
            async for _ in answer:
                break
            await asyncio.to_thread(lambda: next(iter(blocking_answer)))
            with pytest.raises(RuntimeError, match="not whole: its iteration was left early"):
                await answer.result()
            with pytest.raises(RuntimeError, match="not whole: its iteration was left early"):
                blocking_answer.result()


async def test_a_result_after_an_error_is_that_error(router, script) -> None:
    for _ in range(2):
        router.will(script.start(), script.tokens("a", 5), InternalError("bug"))
    async with AsyncClient(router.address) as client:
        with Client(router.address) as blocking:
            answer, blocking_answer = (each.generate("hi") for each in (client, blocking))
            for _ in range(2):
                with pytest.raises(InternalError, match="bug"):
                    await answer.result()
                with pytest.raises(InternalError, match="bug"):
                    await asyncio.to_thread(blocking_answer.result)


async def test_messages_out_of_order_are_refused(router, script, runner) -> None:
    router.will(script.tokens("a", 5))
    with pytest.raises(InternalError, match="out of order"):
        await runner.call(router.address, "complete", "hi")


async def test_a_message_too_large_is_no_overload(router, runner) -> None:
    """At either end, and asking again cannot help."""
    retry = RetryPolicy(max_retries=2, initial_backoff_s=0.001, retry_when_exhausted=True)
    for num_bytes, most in ((5 << 20, 4 << 20), (65 << 20, 64 << 20)):
        with pytest.raises(InvalidArgumentError) as caught:
            await runner.call(router.address, "tokenize", "x" * num_bytes, retry=retry)
        assert (caught.value.field, caught.value.limit) == ("message", f"must be at most {most} bytes")
        assert int(caught.value.value) >= num_bytes
    assert not router.requests


async def test_an_unreachable_router_is_unavailable(runner) -> None:
    with pytest.raises(UnavailableError):
        await runner.call("127.0.0.1:1", "model_info", retry=RetryPolicy(max_retries=1, initial_backoff_s=0.001))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(
    "address", ["", "localhost", "localhost:65537", "http://localhost:50051", "dns:///", "\udcff:1", None]
)
def test_what_is_no_address_is_refused_and_not_dialled_elsewhere(kind: Any, address: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"address = .*: must be HOST:PORT"):
        kind(address)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("settings", [{"tls": "ca.pem"}, {"retry": 5}, {"retry": 0}, {"timeout_s": "5"}])
def test_settings_of_another_class_are_refused_by_name(kind: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kind("localhost:50051", **settings)
    assert [caught.value.field] == list(settings)


def test_an_async_client_says_that_it_belongs_to_one_event_loop(router, script) -> None:
    router.will(pb.GetModelInfoResponse(model="tiny"))
    client = AsyncClient(router.address)
    answer = client.generate("hi")  # outside any: nothing is sent yet

    async def ask() -> None:
        await client.model_info()

    asyncio.run(ask())
    for later in (client.model_info, answer.result):

        async def ask_again(later: Any = later) -> None:
            with pytest.raises(RuntimeError, match="another event loop: make one in each"):
                await later()

        asyncio.run(ask_again())
    asyncio.run(client.close())


@pytest.mark.parametrize("scheme", ["dns:///", "ipv4:"])
async def test_grpcs_own_schemes_are_addresses_too(router, runner, scheme) -> None:
    router.will(pb.GetModelInfoResponse(model="tiny"))
    assert (await runner.call(f"{scheme}{router.address}", "model_info")).model == "tiny"


async def test_a_router_of_this_machine_is_not_sought_behind_a_proxy(router, runner, monkeypatch) -> None:
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    router.will(pb.GetModelInfoResponse(model="tiny"))
    assert (await runner.call(router.address, "model_info", retry=RetryPolicy(max_retries=0))).model == "tiny"


@pytest.mark.parametrize(
    ("address", "is_own"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("ipv4:127.0.0.2:50051", True),
        ("ipv6:[::1]:50051", True),
        ("LOCALHOST:50051", True),
        ("0.0.0.0:50051", True),
        ("[::ffff:127.0.0.1]:50051", True),
        ("localhost.:50051", True),
        ("router.localhost:50051", True),
        ("localhost.localdomain:50051", True),
        ("ipv4:198.51.100.7:50051,127.0.0.1:50051", True),  # gRPC would ask the proxy for a host of that name
        ("ipv6:[2001:db8::7]:50051,[2001:db8::8]:50051", True),
        ("unix-abstract:router", True),
        ("router.example:50051", False),
        ("198.51.100.7:50051", False),
        ("dns:///localhost.example:50051", False),
    ],
)
def test_other_machines_may_be_behind_a_proxy(address, is_own) -> None:
    assert (("grpc.enable_http_proxy", 0) in channel_options(address, None)) is is_own


@pytest.mark.parametrize(("family", "other"), [(socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")])
def test_addresses_of_this_machine_in_a_network_are_its_own(family: int, other: str) -> None:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 1))
            own = probe.getsockname()[0]
    except OSError:
        pytest.skip("needs a network")
    assert ("grpc.enable_http_proxy", 0) in channel_options(f"[{own}]:50051" if ":" in own else f"{own}:50051", None)


def test_this_machines_name_is_its_own() -> None:
    assert ("grpc.enable_http_proxy", 0) in channel_options(f"dns:///{socket.gethostname()}:50051", None)


@pytest.mark.parametrize(
    ("own", "address", "place", "is_own"),
    [
        ("box", "box.corp.example:50051", "127.0.1.1", True),
        ("box", "dns:///BOX.corp.example.:50051", "127.0.1.1", True),
        ("box.corp.example", "box:50051", "127.0.1.1", True),
        ("box", "box.elsewhere.example:50051", "198.51.100.7", False),
        ("box", "box.elsewhere.example:50051", None, False),
        ("box", "boxer:50051", "127.0.1.1", False),  # not looked up
    ],
)
def test_this_machines_longer_name_is_its_own(monkeypatch, own, address, place, is_own) -> None:
    def look_up(host: str, port: None, **kinds: object) -> list[Any]:
        if place is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: own)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert (("grpc.enable_http_proxy", 0) in channel_options(address, None)) is is_own


async def test_model_info_and_tokenize(router, runner) -> None:
    hello = types_pb2.WorkerHello(role="verify", max_sequences=4, step_costs=[{"rows": 1, "context": 512, "ns": 10}])
    info = pb.GetModelInfoResponse(
        model="tiny",
        max_context=64,
        drafters=["model", "ngram"],
        default_sampling=types_pb2.SamplingParams(temperature=0.0, min_p=0.05, stop=["x"]),
        verification_modes=[types_pb2.VERIFICATION_MODE_COUPLED, 77],
        verify_workers=[pb.WorkerInfo(address="a:1", hello=hello, state="ready", load={"free_pages": 3})],
        draft_workers=[pb.WorkerInfo(address="b:2", state="connecting", detail="refused")],
    )
    router.will(grpc.StatusCode.UNAVAILABLE)
    router.will(info)
    got = await runner.call(router.address, "model_info")
    assert (got.model, got.drafters, got.verification_modes) == ("tiny", ("model", "ngram"), ("coupled",))
    assert got.default_sampling.temperature == 0 and got.default_sampling.stop == ("x",)
    assert got.default_sampling.top_p is None and got.default_sampling.min_p == 0.05  # float32 has another number
    assert (got.verify_workers[0].free_pages, got.verify_workers[0].step_costs[0].rows) == (3, 1)
    assert (got.draft_workers[0].role, got.draft_workers[0].detail) == ("draft", "refused")

    router.will(pb.TokenizeResponse(ids=[1, 2]))
    assert await runner.call(router.address, "tokenize", [{"role": "user", "content": "hi"}]) == (1, 2)
    assert router.requests[-1].messages.messages[0].content == "hi"


async def test_detokenize_gives_text_and_bytes(router, runner) -> None:
    router.will(pb.DetokenizeResponse(text="\ufffd!", pieces=[b"\xe2", b"!"]))
    got = await runner.call(router.address, "detokenize", [7, 8])
    assert (str(got), got.pieces) == ("\ufffd!", (b"\xe2", b"!"))
    assert list(router.requests[-1].ids) == [7, 8]


async def test_the_callers_headers_go_with_every_call_and_every_attempt(router, script, runner) -> None:
    headers = {"authorization": "Bearer k"}
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.UNAVAILABLE)
    router.will(script.start(), script.finish())
    await runner.call(router.address, "complete", "hi", headers=headers)
    router.will(pb.TokenizeResponse(ids=[1]))
    await runner.call(router.address, "tokenize", "hi", headers=headers)
    assert [got.get("authorization") for got in router.metadata] == ["Bearer k"] * 3


@pytest.mark.parametrize("source", ["argument", "environment"])
async def test_an_api_key_goes_with_every_call_unless_a_call_names_another(
    router, script, runner, monkeypatch, source: str
) -> None:
    options = {"api_key": "k"} if source == "argument" else {}
    monkeypatch.setenv("BETOKEN_API_KEY", "k" if source == "environment" else "another")
    router.will(script.start(), script.finish())
    await runner.call(router.address, "complete", "hi", client_options=options)
    for headers in (None, {"authorization": "Bearer own"}):
        router.will(pb.TokenizeResponse(ids=[1]))
        await runner.call(router.address, "tokenize", "hi", client_options=options, headers=headers)
    assert [got.get("authorization") for got in router.metadata] == ["Bearer k", "Bearer k", "Bearer own"]


async def test_an_empty_api_key_is_none_whatever_the_environment_says(router, runner, monkeypatch) -> None:
    monkeypatch.setenv("BETOKEN_API_KEY", "k")
    router.will(pb.TokenizeResponse(ids=[1]))
    await runner.call(router.address, "tokenize", "hi", client_options={"api_key": ""})
    assert "authorization" not in router.metadata[0]


@pytest.mark.parametrize("key", ["secret key", "sécret", "secret\n", "s" * 513, 4711])
@pytest.mark.parametrize("client_class", [Client, AsyncClient])
def test_a_key_that_no_header_holds_is_refused_and_not_quoted(client_class, key) -> None:
    with pytest.raises(InvalidArgumentError, match="api_key") as refused:
        client_class("127.0.0.1:1", api_key=key)
    assert str(key) not in str(refused.value)


@pytest.mark.parametrize(
    "headers",
    [{"Authorization": "k"}, {"grpc-timeout": "1S"}, {"x-bin": "k"}, {"x": "é"}, {"x": "a\nb"}, {"x": 1}, "x"],
)
async def test_headers_that_grpc_does_not_send_are_refused_by_name(router, runner, headers) -> None:
    with pytest.raises(InvalidArgumentError, match="headers"):
        await runner.call(router.address, "complete", "hi", headers=headers)


async def test_the_callers_trace_travels_along(router, script, runner) -> None:
    from opentelemetry import context, trace

    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)))
    token = context.attach(trace.set_span_in_context(span))
    try:
        router.will(script.start(), script.finish())
        await runner.call(router.address, "complete", "hi")
    finally:
        context.detach(token)
    assert router.metadata[0]["traceparent"].split("-")[1] == f"{0xABC:032x}"


def test_cancel_from_another_thread_ends_the_iteration(router, script) -> None:
    router.will(script.start(system_fingerprint="f"), script.tokens("a", 5), script.Hang())
    with Client(router.address) as client:
        generation = client.generate("hi")
        with pytest.raises(RequestCancelledError):
            for _ in generation:
                threading.Timer(0.05, generation.cancel).start()
    assert generation.seed == 7 and generation.request_id == "r1" and generation.prompt_ids == (1, 2, 3)
    assert generation.system_fingerprint == "f"


def test_a_cancel_while_the_call_begins_is_not_lost(router, script) -> None:
    router.will(script.start(), script.Hang())
    with Client(router.address, retry=FAST) as client:
        generation = client.generate("hi", timeout_s=60.0)

        class Stub:
            def Generate(self, *args: Any, **options: Any) -> Any:
                call = stub.Generate(*args, **options)
                while not router.requests:
                    time.sleep(0.001)
                generation.cancel()  # as another thread would, which cannot see this call yet
                return call

        stub, client.stub = client.stub, Stub()
        begun_s = time.monotonic()
        with pytest.raises(RequestCancelledError):
            list(generation)
        assert time.monotonic() - begun_s < 30.0  # not at its deadline


def test_closing_the_client_ends_the_iteration(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    client = Client(router.address)
    with pytest.raises(RequestCancelledError, match="closed"):
        for _ in client.generate("hi"):
            threading.Timer(0.05, client.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("hi")


async def once_asked(router: Any) -> None:
    """Return when the router has answered its first call, so that the client waits to ask again."""
    while not router.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


def close_once_asked(client: Client, router: Any) -> None:
    while not router.requests:
        time.sleep(0.01)
    time.sleep(0.2)
    client.close()


def test_closing_the_client_ends_a_wait_to_ask_again(router, script) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = Client(router.address, retry=PATIENT)
    threading.Thread(target=close_once_asked, args=(client, router)).start()
    begun_s = time.monotonic()
    with pytest.raises(RequestCancelledError, match="closed"):
        client.complete("hi")
    assert time.monotonic() - begun_s < 30.0


async def test_closing_the_async_client_ends_a_wait_to_ask_again(router, script) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = AsyncClient(router.address, retry=PATIENT)
    answer = asyncio.ensure_future(client.complete("hi"))
    await once_asked(router)
    await client.close()
    async with asyncio.timeout(30.0):
        with pytest.raises(RequestCancelledError, match="closed"):
            await answer


def test_closing_the_client_ends_a_question_that_waits_to_be_asked_again(router) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = Client(router.address, retry=PATIENT)
    threading.Thread(target=close_once_asked, args=(client, router)).start()
    with pytest.raises(RequestCancelledError, match="closed"):
        client.tokenize("hi")


async def test_closing_the_async_client_ends_a_question_that_waits_to_be_asked_again(router) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = AsyncClient(router.address, retry=PATIENT)
    asking = asyncio.ensure_future(client.tokenize("hi"))
    await once_asked(router)
    await client.close()
    async with asyncio.timeout(30.0):
        with pytest.raises(RequestCancelledError, match="closed"):
            await asking


def test_a_client_closed_while_a_call_begins_says_so(router, script) -> None:
    client = Client(router.address, retry=FAST)
    generation = client.generate("hi")

    class Stub:
        def Generate(self, *args: Any, **options: Any) -> Any:
            client.close()  # as another thread would, after the check
            return stub.Generate(*args, **options)

    stub, client.stub = client.stub, Stub()
    with pytest.raises(RequestCancelledError, match="closed"):
        list(generation)


async def test_cancelling_the_task_cancels_the_call(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        arrived = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hi"):
                arrived.set()

        task = asyncio.create_task(read())
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, 30)


async def test_cancel_from_another_task_ends_the_iteration(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        generation = client.generate("hi")
        with pytest.raises(RequestCancelledError):
            async for _ in generation:
                asyncio.get_running_loop().call_later(0.05, generation.cancel)


async def swallowed() -> None:
    """The task was cancelled once, and went on."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert task.cancelling() > 0


@pytest.mark.parametrize("before_first", [True, False], ids=["before", "between"])
async def test_cancel_is_distinguished_from_a_cancellation_that_the_task_has_swallowed(
    router, script, before_first
) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        generation = client.generate("hi")
        if before_first:
            await swallowed()
        with pytest.raises(RequestCancelledError):
            async for _ in generation:
                await swallowed()
                asyncio.get_running_loop().call_later(0.05, generation.cancel)


async def test_closing_is_distinguished_from_a_cancellation_that_the_task_has_swallowed(router, script) -> None:
    router.will(script.Hang())
    await swallowed()
    client = AsyncClient(router.address)
    asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(client.close()))
    with pytest.raises(RequestCancelledError):
        await client.model_info()


async def test_a_task_that_cancels_itself_in_the_loop_is_cancelled(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:

        async def read() -> None:
            async for _ in client.generate("hi"):
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(read())


async def test_a_lost_stream_is_resumed_in_a_task_that_has_swallowed_a_cancellation(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), grpc.StatusCode.CANCELLED)
    router.will(script.start(), script.tokens("b", 6), script.finish(2))
    await swallowed()
    async with AsyncClient(router.address, retry=FAST) as client:
        assert (await client.complete("hi")).text == "ab"


def test_an_interrupted_client_takes_a_new_connection(router, script) -> None:
    """The interrupt may have left a lock of the old one taken, for ever."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    with Client(router.address, retry=FAST) as client:
        pieces = iter(client.generate("hi"))
        next(pieces)
        stub = client.stub
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
        assert client.stub is not stub
        assert client.complete("hi").text == "b"


def test_an_interrupt_while_a_call_begins_takes_a_new_connection(router, script) -> None:
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    with Client(router.address, retry=FAST) as client:

        class Stub:
            def Generate(self, *args: Any, **options: Any) -> Any:
                raise KeyboardInterrupt

        stub = client.stub = Stub()
        with pytest.raises(KeyboardInterrupt):
            client.complete("hi")
        assert client.stub is not stub
        assert client.complete("hi").text == "b"


def test_an_interrupted_connection_is_not_closed_by_a_caller_that_timed_out(router, script) -> None:
    """gRPC closes a dropped channel, and waits for calls whose end the interrupt never reports."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    enders: list[threading.Thread] = []
    with Client(router.address, retry=FAST) as client:
        pieces = iter(client.generate("hi"))
        next(pieces)
        interrupted = weakref.ref(client._channel)
        close = client._channel.close
        client._channel.close = lambda: (enders.append(threading.current_thread()), close())
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
        gc.collect()
        assert interrupted() is not None and not enders
    deadline_s = time.monotonic() + 30.0
    while not enders and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (ender,) = enders
    assert ender is not threading.main_thread() and ender.daemon


def test_an_answer_is_iterated_once(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.finish(1))
    with Client(router.address) as client:
        generation = client.generate("hi")
        assert [str(piece) for piece in generation] == ["a"]
        assert generation.result().text == "a" == generation.result().text
        with pytest.raises(RuntimeError, match="only once"):
            iter(generation)


def test_an_interpreter_exits_with_a_client_and_a_stream_open(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    code = (
        "from betoken.client import Client\n"
        f"client = Client({router.address!r})\n"
        "pieces = iter(client.generate('hi'))\n"
        "print(next(pieces))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


@pytest.mark.parametrize(
    ("deed", "printed"), [("print(client.complete('hi'), flush=True)", "b\n"), ("client.close()", "")]
)
def test_a_process_forked_off_beside_a_stream_takes_its_own_connection(router, script, deed, printed) -> None:
    """gRPC gives up the one it inherits, whose calls and end hung beyond their deadlines. Its fork handlers wait for
    threads in gRPC's code only if requested; elsewhere one fork in some hundreds aborts the new process."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    if printed:
        router.will(script.start(), script.tokens("b", 5), script.finish(1))
    code = (
        "import os, signal\n"
        "from betoken.client import Client\n"
        f"client = Client({router.address!r}, timeout_s=60.0)\n"
        "pieces = iter(client.generate('hi'))\n"
        "print(next(pieces), flush=True)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    signal.alarm(60)\n"
        f"    {deed}\n"
    )
    env = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout) == (0, f"a\n{printed}"), done.stderr


def test_every_error_is_a_betoken_error() -> None:
    assert issubclass(InvalidArgumentError, BetokenError)
