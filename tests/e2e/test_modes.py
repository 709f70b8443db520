"""Verification by rejection and by typicality, end to end: named, repeatable, and what they promise."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from scipy import stats

from betoken.bench.stack import Stack
from betoken.client import AsyncClient, Completion, InvalidArgumentError, Sampling, Speculation, VerificationMode
from tests.e2e.in_process import VOCAB_SIZE, save_pair, save_pard_pair, services
from tests.products import covering, slow

pytestmark = pytest.mark.asyncio(loop_scope="session")
OTHER_MODES = (VerificationMode.REJECTION, VerificationMode.TYPICAL)
DRAFTERS = ("model", "ngram", "fused")
PROMPT_IDS = [5, 6, 7, 5, 6]
NUM_SAMPLES = 500


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of services with a tiny random pair."""
    folder = tmp_path_factory.mktemp("tiny")
    save_pair(folder)
    async with services(folder) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pard_client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncClient]:
    """A client of services whose draft model is a PARD checkpoint."""
    folder = tmp_path_factory.mktemp("pard")
    save_pard_pair(folder)
    async with services(folder) as connected:
        yield connected


async def complete(
    client: AsyncClient, mode: VerificationMode, drafter: str = "model", prompt=PROMPT_IDS, **sampling: float
) -> Completion:
    fields = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_new_tokens": 40, "ignore_eos": True} | sampling
    how = Speculation(drafter=drafter, num_draft_tokens=4, mode=mode)
    return await client.complete(prompt, sampling=Sampling(**fields), speculation=how)


async def top_logprobs(client: AsyncClient, prompt: list[int]) -> list[tuple[int, float]]:
    """The eight most likely ids after the prompt."""
    answer = await client.complete(prompt, temperature=0, max_new_tokens=1, off=True, logprobs=8, ignore_eos=True)
    assert answer.tokens[0].logprobs is not None
    return list(answer.tokens[0].logprobs.top)


async def repeating_prompt(client: AsyncClient) -> list[int]:
    """A prompt after which the n-gram drafter's guess is one of the target's eight."""
    for token_id, _ in await top_logprobs(client, PROMPT_IDS):
        prompt = [5, 6, token_id, 5, 6]
        if token_id in dict(await top_logprobs(client, prompt)):
            return prompt
    raise AssertionError("none of the eight likely ids repeats itself")


@pytest.mark.parametrize(("mode", "drafter"), covering(OTHER_MODES, DRAFTERS, strength=1))
async def test_answers_of_a_mode_repeat_next_to_streams_of_all_modes(
    client: AsyncClient, mode: VerificationMode, drafter: str
) -> None:
    alone = await complete(client, mode, drafter)
    assert alone.mode is mode
    assert alone.speculation.num_draft_tokens > 0
    assert alone.speculation.num_failed_drafts == 0
    others = [complete(client, other, prompt=[9, i]) for i in range(2) for other in VerificationMode]
    again, *_ = await asyncio.gather(complete(client, mode, drafter), *others)
    assert again.output_ids == alone.output_ids


async def test_the_verification_modes_give_different_tokens(client: AsyncClient) -> None:
    answers = {(await complete(client, mode)).output_ids for mode in VerificationMode}
    assert len(answers) == 3


async def test_typical_accepts_more_than_the_equality_test(client: AsyncClient) -> None:
    rates = {}
    for mode in (VerificationMode.COUPLED, VerificationMode.TYPICAL):
        answers = [await complete(client, mode, seed=seed, temperature=1.0, top_p=1.0) for seed in range(6)]
        drafted = sum(answer.speculation.num_draft_tokens for answer in answers)
        rates[mode] = sum(answer.speculation.num_accepted_tokens for answer in answers) / drafted
    assert rates[VerificationMode.TYPICAL] > rates[VerificationMode.COUPLED]


@pytest.mark.parametrize("drafter", ["model", "ngram", *slow("fused")])  # fused lets its first source draft
async def test_rejection_samples_the_target_s_distribution(client: AsyncClient, drafter: str) -> None:
    await assert_distributed(client, drafter)


async def test_rejection_of_parallel_drafts_samples_the_target_s_distribution(pard_client: AsyncClient) -> None:
    (worker,) = (await pard_client.model_info()).draft_workers
    assert worker.mask_token_id == VOCAB_SIZE - 1
    await assert_distributed(pard_client, "model")


async def assert_distributed(client: AsyncClient, drafter: str) -> None:
    """The first token, drafted and judged, over many seeds, against the best logprobs the target itself reports."""
    prompt = await repeating_prompt(client)
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 8, "max_new_tokens": 2}
    answers = await asyncio.gather(
        *(
            complete(client, VerificationMode.REJECTION, drafter, prompt, seed=seed, **settings)
            for seed in range(NUM_SAMPLES)
        )
    )
    assert all(answer.speculation.num_draft_tokens for answer in answers)
    assert 0 < sum(answer.speculation.num_accepted_tokens for answer in answers) < NUM_SAMPLES
    weights = {token_id: math.exp(logprob) for token_id, logprob in await top_logprobs(client, prompt)}
    counts = Counter(answer.output_ids[0] for answer in answers)
    assert counts.keys() <= weights.keys()
    expected = [weight * NUM_SAMPLES / sum(weights.values()) for weight in weights.values()]
    assert min(expected) >= 5
    assert stats.chisquare([counts[token_id] for token_id in weights], expected).pvalue > 1e-4


async def test_logprobs_are_those_of_the_emitted_tokens(client: AsyncClient) -> None:
    for mode in OTHER_MODES:
        answer = await complete(client, mode, max_new_tokens=12, logprobs=0)
        logprobs = [token.logprobs.logprob for token in answer.tokens]
        resumed = [*PROMPT_IDS, *answer.output_ids[:5]]
        bias = {answer.output_ids[5]: 100.0}  # raw logprobs do not see it, greedy decoding does
        alone = await client.complete(
            resumed, temperature=0, logit_bias=bias, max_new_tokens=1, logprobs=0, off=True, ignore_eos=True
        )
        assert alone.output_ids == answer.output_ids[5:6]
        assert alone.tokens[0].logprobs.logprob == logprobs[5]


async def test_an_unknown_mode_is_refused_by_name(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match=r"speculation\.mode"):
        await client.complete("x", mode="guess")


async def test_greedy_answers_are_the_target_s_own_in_every_mode(stack: Stack, prompts: list[str]) -> None:
    """Real processes; failed drafts, should the machine be slow, change nothing here."""
    answers = [
        await complete(stack.client, mode, drafter, prompts[1], temperature=0)
        for mode in VerificationMode
        for drafter in DRAFTERS
    ]
    assert len({answer.output_ids for answer in answers}) == 1
    assert {answer.mode for answer in answers} == set(VerificationMode)
