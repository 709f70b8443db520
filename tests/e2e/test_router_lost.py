"""The router dies mid-stream: the SDK resumes on its replacement, and the answer is the same."""

import asyncio
from dataclasses import replace

import pytest

from betoken.bench.stack import Stack
from betoken.client import AsyncClient, Completion, UnavailableError

pytestmark = pytest.mark.asyncio(loop_scope="session")
NUM_TOKENS = 200
OPTIONS = {"max_new_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 11, "ignore_eos": True}


async def until_back(stack: Stack) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await stack.client.model_info()
            except UnavailableError:
                await asyncio.sleep(0.1)
            else:
                return


async def answer_through_a_restart(stack: Stack, prompt: str) -> Completion:
    num_received = 0
    restart: asyncio.Task[None] | None = None

    def kill_and_restart() -> None:
        stack.services.kill("router")
        stack.services.restart("router")

    async with AsyncClient(stack.services.address) as client:
        generation = client.generate(prompt, **OPTIONS)
        async for piece in generation:
            num_received += len(piece.tokens)
            if restart is None and num_received >= NUM_TOKENS // 4:
                restart = asyncio.create_task(asyncio.to_thread(kill_and_restart))
        assert restart is not None
        await restart
        return await generation.result()


async def test_text_and_tokens_stay_the_same_if_the_router_is_lost(stack: Stack, prompts: list[str]) -> None:
    expected = await stack.client.complete(prompts[0], **OPTIONS)
    for _ in range(10):  # a pause of this process may be longer than the answer
        try:
            resumed = await answer_through_a_restart(stack, prompts[0])
        finally:
            await until_back(stack)
        if resumed.num_resumes > 0:
            break
    assert resumed.num_resumes > 0, "the answer was over before the router died"
    assert resumed.output_ids == expected.output_ids and resumed.text == expected.text
    usage = replace(resumed.usage, cached_prompt_tokens=expected.usage.cached_prompt_tokens)  # its KV was there
    assert usage == expected.usage and resumed.finish_reason == expected.finish_reason
    assert await stack.all_pages_free()
