"""The client for asyncio: many prompts at once over one connection, each with its own seed.

Start `betoken up`, then `python examples/async_client.py [ADDRESS] [PROMPT ...]`.
"""

import asyncio
import sys

from betoken.client import AsyncClient, Completion

PROMPTS = ("def fibonacci(n):", "class Stack:", "import json")


async def complete(client: AsyncClient, prompts: tuple[str, ...]) -> list[Completion]:
    """Whole answers, in the order of the prompts."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(client.complete(prompt, max_new_tokens=32, temperature=0.8, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
    return [task.result() for task in tasks]


async def main(address: str = "127.0.0.1:50051", *prompts: str) -> None:
    """Print every prompt with its answer."""
    prompts = prompts or PROMPTS
    async with AsyncClient(address) as client:
        for prompt, done in zip(prompts, await complete(client, prompts), strict=True):
            print(f"--- {prompt}{done.text}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
