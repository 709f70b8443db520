"""Several answers of one request: distinguished by index, each resumed alone with its seed."""

from __future__ import annotations

import pytest

from betoken.client import RetryPolicy
from betoken.client.parallel_sampling import ParallelSession
from betoken.client.request import generate_request
from betoken.client.retry import Retries
from betoken.common.errors import InternalError, UnavailableError
from betoken.common.seeds import derived_seed
from betoken.v1 import generation_pb2 as pb

N = 3


def session() -> ParallelSession:
    request = generate_request("hi", {"n": N, "temperature": 0.5})
    return ParallelSession(request, Retries(RetryPolicy(), None), {})


def start(answer: int, seed: int) -> pb.GenerateResponse:
    started = pb.GenerateStart(prompt_ids=[5, 6], seed=seed, request_id=f"r{answer}", system_fingerprint="f")
    return pb.GenerateResponse(answer=answer, start=started)


def tokens(answer: int, *ids: int) -> pb.GenerateResponse:
    told = [pb.GeneratedToken(id=token_id, num_chars=1) for token_id in ids]
    return pb.GenerateResponse(answer=answer, tokens=pb.GenerateTokens(tokens=told, text="x" * len(ids)))


def test_the_prompts_logprobs_are_those_of_all_answers() -> None:
    request = generate_request("hi", {"n": 2, "temperature": 0.5, "prompt_logprobs": 0})
    several = ParallelSession(request, Retries(RetryPolicy(), None), {})
    told = pb.GeneratePromptLogprobs(first_position=1, logprobs=[{"logprob": -0.5}])
    for response in (start(0, 9), pb.GenerateResponse(prompt_logprobs=told), tokens(0, 1), finish(0)):
        several.feed(response)
    request, _ = several.next_request()  # the second one's stream had not begun
    assert (request.sampling.seed, request.resume_prompt_logprobs) == (derived_seed(9, 1), 1)
    for response in (start(0, derived_seed(9, 1)), tokens(0, 8), finish(0)):
        several.feed(response)
    first, second = (part.completion().prompt_logprobs for part in several.parts)
    assert first == second and [one and one.logprob for one in first] == [None, -0.5]


def finish(answer: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(answer=answer, finish=pb.GenerateFinish(reason=pb.FINISH_REASON_STOP))


def test_a_broken_stream_is_resumed_answer_by_answer() -> None:
    several = session()
    request, _ = several.next_request()
    assert request.n == N and not request.resume_ids
    for response in (start(0, 9), tokens(0, 1, 2), start(1, derived_seed(9, 1)), tokens(1, 3), tokens(0, 4), finish(0)):
        piece = several.feed(response)
        assert piece is None or piece.answer == response.answer
    assert not several.is_finished and several.delay_after(UnavailableError("gone")) > 0
    request, _ = several.next_request()
    assert (request.sampling.seed, list(request.resume_ids), request.HasField("n")) == (derived_seed(9, 1), [3], False)
    assert list(request.prompt_ids.ids) == [5, 6] and request.system_fingerprint == "f"
    for response in (start(0, derived_seed(9, 1)), tokens(0, 8), finish(0)):
        piece = several.feed(response)
        assert piece is None or piece.answer == 1
    assert several.delay_after(None) == 0.0 and not several.is_finished
    request, _ = several.next_request()
    assert (request.sampling.seed, list(request.resume_ids)) == (derived_seed(9, 2), [])
    for response in (start(0, derived_seed(9, 2)), tokens(0, 7), finish(0)):
        several.feed(response)
    assert several.is_finished
    assert [part.completion().output_ids for part in several.parts] == [(1, 2, 4), (3, 8), (7,)]
    assert several.completion().seed == 9


def test_a_break_before_the_first_message_repeats_all_answers() -> None:
    several = session()
    several.next_request()
    several.delay_after(UnavailableError("gone"))
    assert several.next_request()[0].n == N
    with pytest.raises(InternalError, match="event of answer"):
        several.feed(start(N, 1))
