"""Overlapped rounds end to end: the same tokens as without, also if workers are lost in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
import pytest_asyncio

from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import AsyncClient, Completion
from tests.e2e.in_process import running, save_pair, until_all_pages_are_free
from tests.e2e.pair import Pair
from tests.e2e.router_constants import constants, taken
from tests.products import covering, slow

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT_IDS = [5, 6, 7, 5, 6]


async def answers(client: AsyncClient, temperature: float, **how) -> list[Completion]:
    """Answers to eight requests of one router at once."""
    fields = {"temperature": temperature, "top_p": 0.95, "max_new_tokens": 60, "ignore_eos": True} | how
    requests = [client.complete([*PROMPT_IDS, seed], seed=seed, **fields) for seed in range(8)]
    return await asyncio.gather(*requests)


@pytest.mark.parametrize(("num_outcomes", "temperature"), covering([1, 2, 3], [0.0, 0.8], strength=1))
async def test_tokens_are_the_same_with_overlapped_rounds(tmp_path, num_outcomes: int, temperature: float) -> None:
    save_pair(tmp_path)
    options = {"overlap": "on", "overlap_outcomes": num_outcomes}
    async with running(tmp_path, router_options=options) as services:
        assert (await services.client.model_info()).num_overlap_outcomes == num_outcomes
        expected = await answers(services.client, temperature, off=True)
        for drafter in ("model", "fused", "ngram"):
            given = await answers(services.client, temperature, drafter=drafter, num_draft_tokens=3)
            assert [one.output_ids for one in given] == [one.output_ids for one in expected]
            stats = [one.speculation for one in given]
            num_used = sum(one.num_used_ahead_tokens for one in stats)
            if drafter == "model":
                assert all(one.num_ahead_hits + one.num_ahead_misses for one in stats)
                assert sum(one.num_ahead_hits for one in stats) <= num_used
                assert num_used <= sum(one.num_ahead_tokens for one in stats)
            assert drafter != "ngram" or not num_used
        await until_all_pages_are_free(services.client)


@pytest.mark.parametrize(
    ("how", "temperature"),
    covering(
        [
            {"constraint": {"regex": "([a-z]{1,9} ){9}"}, "ignore_eos": False},
            {"prediction": [5, 6, 7, 5, 6, 1, 2, 3] * 8, "drafter": "fused"},
            {"n": 2},
            {"repetition_penalty": 1.3},
        ],
        [0.0, 0.8],
        strength=1,
    ),
)
async def test_other_features_keep_their_tokens_with_overlapped_rounds(
    tmp_path, how: dict[str, Any], temperature: float
) -> None:
    """Pages for a part of the sequences only, so that some are preempted between a draft and its result."""
    save_pair(tmp_path)
    async with running(tmp_path, verify_options={"num_pages": 20}, router_options={"overlap": "on"}) as services:
        fields = {"temperature": temperature, "max_new_tokens": 60, "ignore_eos": True} | how

        async def answers_to_eight(**speculation: Any) -> list[Completion]:
            client = services.client
            requests = [
                client.complete_all([*PROMPT_IDS, seed], seed=seed, **fields | speculation) for seed in range(8)
            ]
            return [one for several in await asyncio.gather(*requests) for one in several]

        expected = await answers_to_eight(off=True, drafter=None, prediction=None)
        given = await answers_to_eight(num_draft_tokens=3, **{"drafter": "model"} | how)
        assert [one.output_ids for one in given] == [one.output_ids for one in expected]
        assert all(one.speculation.num_ahead_hits + one.speculation.num_ahead_misses for one in given)
        await until_all_pages_are_free(services.client)


async def test_modes_whose_tokens_depend_on_drafts_are_not_overlapped(tmp_path) -> None:
    save_pair(tmp_path)
    async with running(tmp_path, router_options={"overlap": "on"}) as services:
        given = await answers(services.client, 0.8, drafter="model", mode="rejection")
        assert not any(one.speculation.num_ahead_hits + one.speculation.num_ahead_misses for one in given)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(pair: Pair) -> AsyncIterator[Stack]:
    """Services of the embedded pair with overlapped rounds."""
    options = (*constants(max_probe_pause_s=1.0), "--overlap", "on", "--no-drafts-must-pay")
    config = LocalServicesConfig(pair.target, pair.draft, compile="off", router_options=options)
    async with AsyncExitStack() as exits:
        with taken():
            running_stack = await exits.enter_async_context(Stack(config))
        yield running_stack


@pytest.mark.parametrize("temperature", [0.8, *slow(0.0)])
async def test_tokens_are_the_same_if_an_overlapped_draft_worker_is_killed(
    stack: Stack, prompts: list[str], temperature: float
) -> None:
    num_streamed, is_under_way = 0, asyncio.Event()

    def on_tokens(num_tokens: int) -> None:
        nonlocal num_streamed
        if (num_streamed := num_streamed + num_tokens) >= 100:
            is_under_way.set()

    async def run(drafter: str) -> list[Completion]:
        jobs = [
            generate(stack.client, prompt, sampling(120, temperature, 0.95, seed), speculation(drafter, 4), on_tokens)
            for seed, prompt in enumerate(prompts[:4])
        ]
        return [timed.completion for timed in await asyncio.gather(*jobs)]

    expected = await run("none")
    num_streamed, is_under_way = 0, asyncio.Event()
    given = asyncio.ensure_future(run("model"))
    async with asyncio.timeout(120):
        await is_under_way.wait()
        await stack.kill_draft_worker()
        await stack.restart_draft_worker()
        answered = await given
    assert [one.output_ids for one in answered] == [one.output_ids for one in expected]
    assert sum(one.speculation.num_ahead_hits + one.speculation.num_ahead_misses for one in answered)
    assert await stack.all_pages_free()
