"""Prefix caching changes no token, no logprob, and leaks no page."""

from itertools import pairwise
from pathlib import Path

import pytest

from betoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.e2e.in_process import save_pair, services, until_all_pages_are_free
from tests.products import covering

TURNS = ["The first question, long enough for some pages. ", " And the next one? ", " The last."]
PAGE_SIZE = 16
DRAFTERS = (None, "model", "ngram")


async def conversation(client: AsyncClient, drafter: str | None, temperature: float) -> list[Completion]:
    """Each question holds all that was said before."""
    prompt_ids: list[int] = []
    answers = []
    for turn in TURNS:
        prompt_ids += await client.tokenize(turn)
        speculation = Speculation(drafter=drafter) if drafter else Speculation(off=True)
        sampling = Sampling(temperature=temperature, seed=7, max_new_tokens=16, ignore_eos=True, logprobs=2)
        answers.append(await client.complete(prompt_ids, sampling=sampling, speculation=speculation))
        prompt_ids += answers[-1].output_ids
    return answers


@pytest.mark.parametrize(("family", "dtype"), covering(["llama", "qwen3_5"], ["float32", "bfloat16"], strength=1))
async def test_conversations_are_the_same_with_and_without_prefix_caching(
    tmp_path: Path, family: str, dtype: str
) -> None:
    save_pair(tmp_path, family)
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
            has_snapshots = is_caching and family == "qwen3_5"
            assert (0 < worker.snapshot_bytes <= worker.snapshot_limit_bytes) == has_snapshots
    without, caching = told[: len(told) // 2], told[len(told) // 2 :]
    for before, after in zip(without, caching, strict=True):
        assert [answer.output_ids for answer in before] == [answer.output_ids for answer in after]
        assert [[token.logprobs for token in answer.tokens] for answer in before] == [
            [token.logprobs for token in answer.tokens] for answer in after
        ]
    assert num_cached[0] == 0
    assert num_cached[1] == sum(answer.usage.cached_prompt_tokens for answers in caching for answer in answers)
    for answer, following in pairwise(caching[0]):
        num_full = (len(answer.prompt_ids) + len(answer.output_ids) - 1) // PAGE_SIZE
        assert following.usage.cached_prompt_tokens == num_full * PAGE_SIZE
    for answer in caching[1]:  # asked before
        assert answer.usage.cached_prompt_tokens == (len(answer.prompt_ids) - 1) // PAGE_SIZE * PAGE_SIZE
    assert all(answer.usage.cached_prompt_tokens == 0 for answers in without for answer in answers)
