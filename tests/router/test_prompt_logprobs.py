"""Logprobs of a prompt reach the client before its answer, each position once, whatever breaks on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from betoken.common.seeds import derived_seed
from betoken.v1 import generation_pb2 as pb
from tests.raw_http2 import RawConnection
from tests.router.harness import GENERATE, Cluster, MakeCluster, Reply, add_event, reply_of, request

PROMPT = [*range(3, 23)]
ASKED: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "prompt_logprobs": 1}


def reported_of(prompt: list[int], start: int = 1) -> list[tuple[int, float, list[int]]]:
    """Prompt logprobs of the fake worker."""
    return [(position, -0.5 * position, [prompt[position]]) for position in range(start, len(prompt))]


@pytest.mark.parametrize("fields", [{}, {"off": True}, {"logprobs": 1}, {"temperature": 0.9, "seed": 4}], ids=str)
async def test_prompt_logprobs_of_each_position_are_reported_before_the_answer(
    make_cluster: MakeCluster, fields: dict[str, Any]
) -> None:
    cluster = await make_cluster()
    cluster.verifiers[0].prefill_rows = 3
    plain = await cluster.generate(**ASKED | fields | {"max_new_tokens": 25, "prompt_ids": PROMPT})
    reply = await cluster.generate(
        prompt_ids=PROMPT, ignore_eos=True, max_new_tokens=25, **fields | {"seed": plain.start.seed}
    )
    assert plain.prompt == reported_of(PROMPT) and not reply.prompt
    assert plain.ids == reply.ids
    await cluster.until_idle()


@pytest.mark.parametrize("prompt", [PROMPT, [5]], ids=len)
async def test_an_answer_with_prompt_logprobs_may_have_no_tokens(make_cluster: MakeCluster, prompt: list[int]) -> None:
    cluster = await make_cluster()
    reply = await cluster.generate(**ASKED | {"prompt_ids": prompt}, max_new_tokens=0)
    assert reply.prompt == reported_of(prompt) and not reply.tokens
    assert reply.finish.reason == pb.FINISH_REASON_LENGTH
    assert (reply.finish.usage.prompt_tokens, reply.finish.usage.output_tokens) == (len(prompt), 0)
    assert len(cluster.verifiers[0].opened) == (len(prompt) > 1) and not cluster.verifiers[0].num_blocks
    await cluster.until_idle()


async def broken_after(cluster: Cluster, num_events: int, **fields: Any) -> Reply:
    """The answer of a request whose verify worker dies once the client has that much of the prompt."""
    reply, is_broken = Reply(), False
    async for event in cluster.stub.Generate(request(**ASKED, max_new_tokens=8, **fields), timeout=60):
        add_event(reply, event)
        if len(reply.prompt) >= num_events and not is_broken:
            is_broken = True
            await next(worker for worker in cluster.verifiers if worker.num_open).kill()
    return reply


@pytest.mark.parametrize("num_events", [2, 12, 19])
async def test_a_lost_worker_repeats_no_prompt_logprobs(make_cluster: MakeCluster, num_events: int) -> None:
    cluster = await make_cluster(num_verifiers=2, step_s=0.03)
    for worker in cluster.verifiers:
        worker.prefill_rows = 2
    reply = await broken_after(cluster, num_events)
    assert reply.prompt == reported_of(PROMPT)
    assert reply.ids == cluster.target_ids(8, PROMPT)
    assert reply.finish.speculation.num_failovers == 1


@pytest.mark.parametrize("fault", ["bad_prompt_position", "bad_prompt_logprobs"])
async def test_impossible_prompt_logprobs_are_requested_again(make_cluster: MakeCluster, fault: str) -> None:
    cluster = await make_cluster()
    cluster.verifiers[0].prefill_rows = 7
    setattr(cluster.verifiers[0].faults, fault, 1)
    reply = await cluster.generate(**ASKED, max_new_tokens=4)
    assert reply.prompt == reported_of(PROMPT)
    assert reply.finish.speculation.num_failovers == 1
    await cluster.until_idle()


async def test_received_prompt_logprobs_are_not_sent_again(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    whole = await cluster.generate(**ASKED, max_new_tokens=6)
    for num_sent in (1, 18, 19):
        reply = await cluster.generate(**ASKED, max_new_tokens=6, resume_prompt_logprobs=num_sent)
        assert (reply.prompt, reply.ids) == (reported_of(PROMPT, 1 + num_sent), whole.ids)
    for resume_ids in (whole.ids[:2], whole.ids):
        reply = await cluster.generate(**ASKED, max_new_tokens=6, resume_ids=resume_ids)
        assert (reply.prompt, reply.ids) == ([], whole.ids[len(resume_ids) :])
    nothing = await cluster.generate(**ASKED, max_new_tokens=0, resume_prompt_logprobs=19)
    assert not nothing.prompt and nothing.finish.reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize("max_new_tokens", [0, 5])
async def test_of_several_answers_the_first_has_the_prompt_logprobs(
    make_cluster: MakeCluster, max_new_tokens: int
) -> None:
    cluster = await make_cluster(step_s=0.005)
    cluster.verifiers[0].prefill_rows = 4
    replies = [Reply() for _ in range(3)]
    fields = ASKED | {"temperature": 0.8, "seed": 7, "max_new_tokens": max_new_tokens, "n": 3}
    async for event in cluster.stub.Generate(request(**fields), timeout=30):
        add_event(replies[event.answer], event)
        assert event.answer == 0 or len(replies[0].prompt) == len(PROMPT) - 1
    assert [len(reply.prompt) for reply in replies] == [len(PROMPT) - 1, 0, 0]
    for index, reply in enumerate(replies):
        assert reply.start.seed == (derived_seed(7, index) if index else 7)
        assert len(reply.ids) == max_new_tokens and reply.finish.reason == pb.FINISH_REASON_LENGTH
    await cluster.until_idle()


async def test_a_client_that_does_not_read_leaves_its_pages_and_misses_nothing(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("betoken.router.round.round_loop._BEHIND_S", 0.1)
    cluster = await make_cluster()
    verifier = cluster.verifiers[0]
    verifier.prefill_rows = 300
    prompt = [3 + index % 20 for index in range(1500)]
    async with RawConnection(cluster.address, window=0) as slow:
        stream = slow.call(GENERATE, request(**ASKED | {"prompt_ids": prompt}, max_new_tokens=3))
        await cluster.until(lambda: len(verifier.opened) == 1 and verifier.num_open == 0)
        slow.open_window(stream)
        await cluster.until(lambda: stream in slow.ended)
        reply = reply_of(slow, stream)
    assert reply.prompt == reported_of(prompt)
    assert reply.ids == cluster.target_ids(3, prompt) and len(verifier.opened) > 1
    assert reply.finish.speculation.num_failovers == 0
    await cluster.until_idle()


async def test_many_prompts_with_logprobs_share_a_worker(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    cluster.verifiers[0].prefill_rows = 5
    prompts = [PROMPT[: 2 + index] for index in range(18)]
    asked = [cluster.generate(**ASKED | {"prompt_ids": prompt}, max_new_tokens=3) for prompt in prompts]
    assert [reply.prompt for reply in await asyncio.gather(*asked)] == [reported_of(prompt) for prompt in prompts]
    await cluster.until_idle()
