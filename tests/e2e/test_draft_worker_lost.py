"""The draft worker dies or hangs mid-stream: the tokens stay the same, and it is taken back when it returns."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from tests.e2e.pair import Pair
from tests.e2e.router_constants import constants, taken

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_TOKENS = 160
NUM_STREAMS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(pair: Pair) -> AsyncIterator[Stack]:
    """Router and workers with the default timeouts of drafts."""
    config = LocalServicesConfig(
        pair.target, pair.draft, compile="off", router_options=constants(max_probe_pause_s=1.0)
    )
    async with AsyncExitStack() as exits:
        with taken():
            running = await exits.enter_async_context(Stack(config))
        yield running


async def answers(stack: Stack, prompts: list[str], drafter: str, on_tokens=None) -> list[tuple[int, ...]]:
    how = speculation(drafter, 4)
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(generate(stack.client, prompt, sampling(NUM_TOKENS, 0.8, 0.95, seed), how, on_tokens))
            for seed, prompt in enumerate(prompts[:NUM_STREAMS])
        ]
    return [task.result().completion.output_ids for task in running]


async def until_drafted_again(stack: Stack, prompt: str) -> None:
    async with asyncio.timeout(60):
        while True:
            timed = await generate(stack.client, prompt, sampling(16, 0.0), speculation("model", 4))
            if timed.completion.speculation.num_drafts:
                return
            await asyncio.sleep(0.2)


async def test_a_draft_worker_that_hangs_after_the_sixth_piece_is_one_short_wait(
    stack: Stack, prompts: list[str]
) -> None:
    await until_drafted_again(stack, prompts[0])
    gaps_s: list[float] = []
    last_s, num_pieces = time.monotonic(), 0
    generation = stack.client.generate(
        prompts[0], sampling=sampling(NUM_TOKENS, 0.0, ignore_eos=True), speculation=speculation("model", 4)
    )
    try:
        async for _ in generation:
            now_s = time.monotonic()
            if num_pieces >= 6:
                gaps_s.append(now_s - last_s)
            last_s, num_pieces = now_s, num_pieces + 1
            if num_pieces == 6:
                await stack.pause_draft_worker()
    finally:
        await stack.resume_draft_worker()
    waits_s = [gap_s for gap_s in gaps_s if gap_s > 0.5]  # several waits had lasted more than five seconds in all
    assert sum(waits_s) < 4.0, f"waits of {waits_s} s"
    await until_drafted_again(stack, prompts[0])


@pytest.mark.parametrize("how", ["killed", "hung"])
async def test_tokens_stay_the_same_if_the_draft_worker_is_lost(stack: Stack, prompts: list[str], how: str) -> None:
    expected = await answers(stack, prompts, "none")
    strike, mend = {
        "killed": (stack.kill_draft_worker, stack.restart_draft_worker),
        "hung": (stack.pause_draft_worker, stack.resume_draft_worker),
    }[how]
    num_tries, was_lost_in_time = 0, False
    while not was_lost_in_time:  # a pause of this process may be longer than the answers
        num_tries += 1
        assert num_tries <= 10, "the answers were over before the draft worker was lost"
        is_under_way = asyncio.Event()
        num_streamed = 0

        def on_tokens(num_tokens: int, is_under_way: asyncio.Event = is_under_way) -> None:
            nonlocal num_streamed
            num_streamed += num_tokens
            if num_streamed >= NUM_STREAMS * NUM_TOKENS // 4:
                is_under_way.set()

        running = asyncio.ensure_future(answers(stack, prompts, "model", on_tokens))
        async with asyncio.timeout(60):
            await is_under_way.wait()
            await strike()
            was_lost_in_time = not running.done()
            try:
                assert await running == expected
            finally:
                await mend()
    await until_drafted_again(stack, prompts[0])
    assert await stack.all_pages_free()
