"""A target with int8 activations through real services: the same tokens in any batch, with drafts, after failover."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from betoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.e2e.in_process import running, save_pair

ROUNDED = {"quantize": "int4"}
INT8: dict[str, Any] = ROUNDED | {"activations": "int8"}
PROMPTS = [f"abc {n} de" for n in range(8)]
SAMPLING = Sampling(temperature=0.8, seed=3, max_new_tokens=48, ignore_eos=True)
DRAFTED = Speculation("model", num_draft_tokens=4)


async def answer(client: AsyncClient, prompt: str, speculation: Speculation) -> Completion:
    return await client.complete(prompt, sampling=SAMPLING, speculation=speculation)


async def details(client: AsyncClient) -> str:
    """Why verify workers are refused."""
    workers = (await client.model_info()).verify_workers
    return " ".join(worker.detail for worker in workers if worker.state == "refused")


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.output_ids) for completion in completions]


@pytest.mark.timeout(300)
async def test_tokens_of_an_int8_target_are_equal_in_any_batch_and_after_failover(tmp_path: Path) -> None:
    save_pair(tmp_path)
    draft = ROUNDED | {"drafters": ("model",)}
    async with running(tmp_path, draft, INT8, other_verify_options=[INT8]) as stack:
        client = stack.client
        alone = ids_of([await answer(client, prompt, Speculation(off=True)) for prompt in PROMPTS])
        together = await asyncio.gather(*(answer(client, prompt, DRAFTED) for prompt in PROMPTS))
        assert ids_of(together) == alone
        stack.verify_hold.after(6)
        waiting = asyncio.gather(*(answer(client, prompt, DRAFTED) for prompt in PROMPTS))
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert ids_of(lost) == alone
        assert sum(completion.speculation.num_failovers for completion in lost) > 0


@pytest.mark.timeout(300)
async def test_workers_with_int8_and_exact_activations_are_not_one_fleet(tmp_path: Path) -> None:
    save_pair(tmp_path)
    draft = {"drafters": ("ngram",)}
    async with running(tmp_path, draft, INT8, other_verify_options=[ROUNDED]) as stack:
        async with asyncio.timeout(60):
            while "numerics" not in await details(stack.client):  # noqa: ASYNC110 - the second one is rejected when dialled
                await asyncio.sleep(0.02)
