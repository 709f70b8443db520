"""An EAGLE-3 layer attached to the verify worker, over real services: the plain tokens in fewer forwards."""

import asyncio
from pathlib import Path

import pytest

from betoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.e2e.in_process import VOCAB_SIZE, save_pair, services, until_all_pages_are_free

PROMPTS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(8)]


def save_all(folder: Path) -> dict[str, object]:
    """The tiny pair and a random layer for its target; the options of a verify worker that has it attached."""
    save_pair(folder)
    shape = tiny_shape(
        hidden_size=32, target_hidden_size=32, vocab_size=VOCAB_SIZE, draft_vocab_size=200, state_layers=(0, 1, 1)
    )
    save_layer(folder / "eagle3", tiny_layer(shape, spread=0.4))
    return {"attached_drafters": ("ngram", "eagle3"), "eagle3": str(folder / "eagle3")}


async def answers(client: AsyncClient, speculation: Speculation, temperature: float) -> list[Completion]:
    """All prompts at once."""
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True, logprobs=2)
    waiting = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt in PROMPTS]
    return await asyncio.gather(*waiting)


def told(completions: list[Completion]) -> list[object]:
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in completions]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_pages", [256, 24])
async def test_trees_and_chains_give_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    verify = save_all(tmp_path) | {"dtype": dtype, "num_pages": num_pages, "max_context": 200}
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        assert "eagle3" in (await client.model_info()).drafters
        for temperature in (0.0, 0.8):
            plain = told(await answers(client, Speculation(off=True), temperature))
            accepted = 0
            for num_draft_tokens in (None, 1, 4, 8):
                for branches in (1, 4):
                    speculation = Speculation("eagle3", {"max_branches": branches}, num_draft_tokens)
                    drafted = await answers(client, speculation, temperature)
                    assert told(drafted) == plain, (temperature, num_draft_tokens, branches)
                    assert sum(one.speculation.num_failed_drafts for one in drafted) == 0
                    tokens = [token for one in drafted for token in one.tokens if token.source]
                    assert {token.source for token in tokens} <= {"eagle3"}
                    accepted += len(tokens)
            assert accepted > 0
        await until_all_pages_are_free(client)
