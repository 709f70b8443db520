"""Whatever a drafter proposes, through all three services: the text stays the target's and no page is lost."""

import asyncio
from pathlib import Path

import pytest

from betoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.e2e.hostile_drafter import HostileDrafter
from tests.e2e.in_process import save_pair, services, until_all_pages_are_free

HOSTILE = "tests.e2e.hostile_drafter:HostileDrafter"
RULED = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 1.5}, "min_new_tokens": 20}
SAMPLINGS = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    {"temperature": 1.0, "top_k": 20, **RULED},
]
PROMPTS = [[5, 6, 7, 5, 6], [9] * 30, [3], list(range(10, 60))]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_pair(path)
    return path


async def answer(client: AsyncClient, index: int, speculation: Speculation) -> Completion:
    prompt, sampling = PROMPTS[index % len(PROMPTS)], SAMPLINGS[index % len(SAMPLINGS)]
    return await client.complete(
        prompt, sampling=Sampling(seed=index, max_new_tokens=NUM_TOKENS, **sampling), speculation=speculation
    )


@pytest.mark.parametrize("num_pages", [256, 14])
async def test_no_draft_changes_the_text_or_leaks_a_page(folder: Path, num_pages: int) -> None:
    """With few pages running sequences are preempted and recomputed meanwhile."""
    drafters = (HOSTILE, "model", "ngram")
    async with services(folder, {"drafters": drafters, "model_branches": 3}, {"num_pages": num_pages}) as client:
        indices = range(len(PROMPTS) * len(SAMPLINGS))
        plain = [await answer(client, index, Speculation(off=True)) for index in indices]
        truths = {tuple(PROMPTS[index % len(PROMPTS)]): plain[index].output_ids for index in indices}
        HostileDrafter.reset(num_pages, truths)
        drafted = await asyncio.gather(
            *(
                answer(client, index, Speculation(drafter=drafter, num_draft_tokens=1 + index % 9))
                for index in indices
                for drafter in (HOSTILE, "model")
            )
        )
        assert [completion.output_ids for completion in drafted[::2]] == [c.output_ids for c in plain]
        assert [completion.output_ids for completion in drafted[1::2]] == [c.output_ids for c in plain]
        for side in (drafted[::2], drafted[1::2]):
            assert sum(completion.speculation.num_accepted_tokens for completion in side) > 50
        assert len(HostileDrafter.num_of) == 8, "every kind of draft was made"
        await until_all_pages_are_free(client)
        info = await client.model_info()
        num_preemptions = sum(worker.preemptions for worker in info.verify_workers)
        assert (num_preemptions > 0) == (num_pages == 14)
