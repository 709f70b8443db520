"""Whatever way requests end, every page of every worker is free afterwards."""

import asyncio
import sys

import pytest

from betoken.bench.stack import Stack
from betoken.client import DeadlineExceededError

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIENT_PROGRAM = """
import sys
from betoken.client import Client
with Client(sys.argv[1]) as client:
    for _ in client.generate(sys.argv[2], max_new_tokens=600, temperature=0, ignore_eos=True):
        print("piece", flush=True)
"""


async def finish(stack: Stack, prompt: str) -> None:
    completion = await stack.client.complete(prompt, max_new_tokens=24, temperature=0.8, seed=1)
    assert completion.tokens


async def cancel(stack: Stack, prompt: str) -> None:
    generation = stack.client.generate(prompt, max_new_tokens=600, temperature=0, ignore_eos=True)
    async for _ in generation:
        break
    generation.cancel()


async def cancel_before_the_first_token(stack: Stack, prompt: str) -> None:
    task = asyncio.ensure_future(stack.client.complete(8 * prompt, max_new_tokens=100, ignore_eos=True))
    await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def run_out_of_time(stack: Stack, prompt: str) -> None:
    timeout_s = 0.15
    while True:
        try:
            await stack.client.complete(prompt, max_new_tokens=600, temperature=0, ignore_eos=True, timeout_s=timeout_s)
        except DeadlineExceededError:
            return
        timeout_s /= 2  # on a faster machine


async def kill_the_client(stack: Stack, prompt: str) -> None:
    arguments = ["-c", CLIENT_PROGRAM, stack.services.address, prompt]
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"piece\n"
    finally:
        process.kill()
        await process.wait()


ENDINGS = (finish, cancel, cancel_before_the_first_token, run_out_of_time, kill_the_client)


async def test_all_pages_are_free_after_any_mix_of_endings(stack: Stack, prompts: list[str]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(prompts[:10]):
            tasks.create_task(ENDINGS[index % len(ENDINGS)](stack, prompt))
    assert await stack.all_pages_free()
    info = await stack.client.model_info()
    assert all(worker.total_pages > 0 for worker in info.verify_workers)
