"""What workers keep of earlier requests changes no token, no logprob, and leaks no page."""

from pathlib import Path

import pytest

from foretoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.e2e.in_process import save_pair, services
from tests.e2e.test_hostile_drafts import until_all_pages_are_free

TURNS = ["The first question, long enough for some pages. ", " And the next one? ", " The last."]
DRAFTERS = (None, "model", "ngram")


async def conversation(client: AsyncClient, drafter: str | None, temperature: float) -> list[Completion]:
    """Each question holds all that was said before."""
    prompt_ids: list[int] = []
    answers = []
    for turn in TURNS:
        prompt_ids += await client.tokenize(turn)
        speculation = Speculation(drafter=drafter) if drafter else Speculation(off=True)
        sampling = Sampling(temperature=temperature, seed=7, max_new_tokens=24, ignore_eos=True, logprobs=2)
        answers.append(await client.complete(prompt_ids, sampling=sampling, speculation=speculation))
        prompt_ids += answers[-1].output_ids
    return answers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_conversations_are_the_same_with_and_without(tmp_path: Path, dtype: str) -> None:
    save_pair(tmp_path)
    told: list[list[Completion]] = []
    num_cached: list[int] = []
    for is_caching in (False, True):
        options = {"prefix_caching": is_caching, "dtype": dtype}
        async with services(tmp_path, {"drafters": ("model", "ngram")} | options, options) as client:
            for temperature in (0.0, 0.8):
                for drafter in DRAFTERS:
                    told.append(await conversation(client, drafter, temperature))
            await until_all_pages_are_free(client)
            (worker,) = (await client.model_info()).verify_workers
            num_cached.append(worker.cached_tokens)
    without, caching = told[: len(told) // 2], told[len(told) // 2 :]
    for before, after in zip(without, caching, strict=True):
        assert [answer.output_ids for answer in before] == [answer.output_ids for answer in after]
        assert [[token.logprobs for token in answer.tokens] for answer in before] == [
            [token.logprobs for token in answer.tokens] for answer in after
        ]
    num_prompt_tokens = sum(len(answer.prompt_ids) for answers in caching for answer in answers)
    assert num_cached[0] == 0 and num_cached[1] > num_prompt_tokens / 2
