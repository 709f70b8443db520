"""Answers, methods and errors of both clients against a scripted router; every case runs through each."""

import asyncio
from typing import Any

import grpc
import pytest

from betoken.client import (
    AsyncClient,
    BetokenError,
    Client,
    FinishReason,
    InternalError,
    InvalidArgumentError,
    TokenOrigin,
)
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2


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


async def test_complete_returns_the_whole_answer(router, script, runner) -> None:
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


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("settings", [{"tls": "ca.pem"}, {"retry": 5}, {"retry": 0}, {"timeout_s": "5"}])
def test_client_settings_of_another_class_are_rejected_by_name(kind: Any, settings: dict[str, Any]) -> None:
    (field,) = settings
    with pytest.raises(InvalidArgumentError, match=f"^{field} = "):
        kind("localhost:50051", **settings)


def test_an_async_client_reports_that_it_belongs_to_one_event_loop(router, script) -> None:
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


def test_an_answer_is_iterated_once(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.finish(1))
    with Client(router.address) as client:
        generation = client.generate("hi")
        assert [str(piece) for piece in generation] == ["a"]
        assert generation.result().text == "a" == generation.result().text
        with pytest.raises(RuntimeError, match="only once"):
            iter(generation)


def test_every_error_is_a_betoken_error() -> None:
    assert issubclass(InvalidArgumentError, BetokenError)
