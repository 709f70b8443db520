"""A drafter attached to the verify worker, over real services: the plain tokens in fewer forwards."""

import asyncio
from pathlib import Path

import pytest

from betoken.client import AsyncClient, Completion, InvalidArgumentError, Sampling, Speculation, VerificationMode
from tests.e2e.in_process import save_pair, services, until_all_pages_are_free

PROMPTS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(8)]
SHAPES = ((8, 1), (None, 1), (1, 4), (None, 4), (8, 4))
"""Numbers of draft tokens and branches."""
ATTACHED = {"attached_drafters": ("ngram",)}


async def answers(client: AsyncClient, speculation: Speculation, temperature: float) -> list[Completion]:
    """All prompts at once."""
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True, logprobs=2)
    waiting = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt in PROMPTS]
    return await asyncio.gather(*waiting)


def reported(completions: list[Completion]) -> list[object]:
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in completions]


@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 24), ("bfloat16", 256)])
async def test_attached_ngrams_give_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    save_pair(tmp_path)
    verify = ATTACHED | {"dtype": dtype, "num_pages": num_pages, "max_context": 200}
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        info = await client.model_info()
        assert "ngram" in info.drafters
        for temperature in (0.0, 0.8):
            plain = reported(await answers(client, Speculation(off=True), temperature))
            for num_draft_tokens, branches in SHAPES if dtype == "float32" else SHAPES[::2]:
                speculation = Speculation("ngram", {"max_branches": branches}, num_draft_tokens)
                drafted = await answers(client, speculation, temperature)
                assert reported(drafted) == plain, (temperature, num_draft_tokens, branches)
            assert sum(one.speculation.num_accepted_tokens for one in drafted) > 0
            accepted = [token for one in drafted for token in one.tokens if token.source]
            assert {token.source for token in accepted} == {"ngram"}
            assert len(accepted) == sum(one.speculation.num_accepted_tokens for one in drafted)
        await until_all_pages_are_free(client)


async def test_modes_take_attached_chains_and_repeat(tmp_path: Path) -> None:
    save_pair(tmp_path)
    async with services(tmp_path, {"drafters": ("model",)}, ATTACHED) as client:
        for mode in (VerificationMode.REJECTION, VerificationMode.TYPICAL):
            speculation = Speculation("ngram", mode=mode)
            first = reported(await answers(client, speculation, 0.8))
            assert reported(await answers(client, speculation, 0.8)) == first
            greedy = await answers(client, Speculation(off=True), 0.0)
            if mode is VerificationMode.REJECTION:
                assert reported(await answers(client, speculation, 0.0)) == reported(greedy)


async def test_settings_of_an_attached_drafter_are_refused_by_their_name(tmp_path: Path) -> None:
    save_pair(tmp_path)
    async with services(tmp_path, {"drafters": ("model",)}, ATTACHED) as client:
        with pytest.raises(InvalidArgumentError, match=r"speculation.drafter.settings.max_ngram"):
            await client.complete("x", speculation=Speculation("ngram", {"max_ngram": "many"}))
        with pytest.raises(InvalidArgumentError, match=r"must be one of: model, ngram"):
            await client.complete("x", speculation=Speculation("other"))


async def test_attached_ngrams_draft_from_a_prediction(tmp_path: Path) -> None:
    save_pair(tmp_path)
    async with services(tmp_path, {"drafters": ("model",)}, ATTACHED) as client:
        for temperature in (0.0, 0.8):
            plain = await answers(client, Speculation(off=True), temperature)
            sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True, logprobs=2)
            for prompt, expected in zip(PROMPTS, plain, strict=True):
                predicted = [*expected.output_ids[:20], 5, *expected.output_ids[22:]]
                answer = await client.complete(prompt, sampling=sampling, num_draft_tokens=4, prediction=predicted)
                assert reported([answer]) == reported([expected]) and answer.drafter == "ngram"
                stats = answer.speculation
                accepted = [token.source for token in answer.tokens].count("prediction")
                assert accepted == stats.num_accepted_prediction_tokens > 20
                assert stats.num_rejected_prediction_tokens > 0
        with pytest.raises(InvalidArgumentError, match="prediction"):
            await client.complete("x", drafter="model", prediction="y")
