"""Whatever ends or steers a request, its attached rounds give what plain decoding gives and leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import AsyncClient, Completion, DeadlineExceededError, Sampling, Speculation, SpeculationStats
from betoken.common import names
from tests.e2e.attached import DRAFTERS, TEMPERATURES, save_attached
from tests.e2e.in_process import Running, running, until_all_pages_are_free
from tests.e2e.pair import Pair
from tests.products import slow

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "7 is 7 and 7 is 7, so 7 is "
OFF = Speculation(off=True)


@pytest.fixture(params=DRAFTERS)
def attached(request: pytest.FixtureRequest) -> Speculation:
    """Each drafter in turn, with trees of eight tokens."""
    return Speculation(request.param, num_draft_tokens=8)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Services whose verify worker has all drafters attached."""
    folder: Path = tmp_path_factory.mktemp("pair")
    async with running(folder, {"drafters": ("model",)}, save_attached(folder)) as stack:
        yield stack


@pytest.fixture
def client(stack: Running) -> AsyncClient:
    """A client of them."""
    return stack.client


async def ask(client: AsyncClient, speculation: Speculation, **fields: Any) -> Completion:
    given: dict[str, Any] = {"temperature": 0.0, "seed": 5, "max_new_tokens": 96, "ignore_eos": True} | fields
    return await client.complete(PROMPT, sampling=Sampling(**given), speculation=speculation)


@pytest.mark.parametrize("temperature", [0.8, *slow(0.0)])
async def test_a_stop_string_ends_an_answer_where_plain_decoding_ends(
    client: AsyncClient, attached: Speculation, temperature: float
) -> None:
    whole = await ask(client, OFF, temperature=temperature)
    for start in (10, 60):
        stop = "".join(token.text for token in whole.tokens[start : start + 3])
        plain, drafted = [await ask(client, how, temperature=temperature, stop=(stop,)) for how in (OFF, attached)]
        assert (drafted.text, drafted.output_ids) == (plain.text, plain.output_ids)
        assert (drafted.finish_reason, drafted.stop) == (plain.finish_reason, plain.stop) and drafted.stop == stop
    await until_all_pages_are_free(client)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 7, 50, 96])
async def test_no_attached_round_exceeds_max_new_tokens(
    client: AsyncClient, attached: Speculation, max_new_tokens: int
) -> None:
    plain, drafted = [await ask(client, how, max_new_tokens=max_new_tokens) for how in (OFF, attached)]
    assert drafted.output_ids == plain.output_ids and len(drafted.output_ids) == max_new_tokens
    assert drafted.usage.output_tokens == max_new_tokens


async def test_eos_and_stop_ids_end_attached_rounds(client: AsyncClient, attached: Speculation) -> None:
    whole = await ask(client, OFF)
    for stop_id in {whole.output_ids[20], whole.output_ids[70]}:
        plain, drafted = [await ask(client, how, stop_token_ids=(stop_id,)) for how in (OFF, attached)]
        assert drafted.output_ids == plain.output_ids and drafted.finish_reason == plain.finish_reason


async def test_penalties_and_logprobs_are_those_of_plain_decoding(client: AsyncClient, attached: Speculation) -> None:
    rules = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 3}
    plain, drafted = [await ask(client, how, **rules) for how in (OFF, attached)]
    assert [(token.id, token.logprobs) for token in drafted.tokens] == [
        (token.id, token.logprobs) for token in plain.tokens
    ]


async def test_a_deadline_ends_rounds_and_frees_their_pages(stack: Running, attached: Speculation) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    stack.verify_hold.after(8)  # the deadline comes in mid-answer, on a fast machine too
    generation = stack.client.generate(PROMPT, sampling=sampling, speculation=attached, timeout_s=0.5)
    with pytest.raises(DeadlineExceededError, match="(?i)deadline|time allowed"):
        async for _ in generation:
            pass
    stack.verify_hold.release()
    await until_all_pages_are_free(stack.client)


async def test_a_client_that_leaves_ends_rounds_and_frees_their_pages(
    client: AsyncClient, attached: Speculation
) -> None:
    sampling = Sampling(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    generation = client.generate(PROMPT, sampling=sampling, speculation=attached)
    async for _ in generation:
        break
    generation.cancel()
    await until_all_pages_are_free(client)
    assert (await ask(client, attached)).output_ids == (await ask(client, OFF)).output_ids


async def test_a_text_found_in_the_prefix_cache_is_drafted_from(client: AsyncClient, attached: Speculation) -> None:
    temperature = TEMPERATURES[str(attached.drafter)]
    plain, again = [await ask(client, how, temperature=temperature) for how in (OFF, attached)]
    assert again.output_ids == plain.output_ids
    assert again.usage.cached_prompt_tokens > 0 and again.speculation.num_accepted_tokens > 0


async def test_counts_and_sources_of_attached_rounds_agree(client: AsyncClient, attached: Speculation) -> None:
    how = replace(attached, report_rounds=True)
    answer = await ask(client, how, temperature=TEMPERATURES[str(attached.drafter)])
    stats = answer.speculation
    assert answer.drafter == attached.drafter and stats.num_failed_drafts == stats.num_failovers == 0
    assert stats.num_accepted_tokens == sum(stats.num_accepted_per_position) > 0
    assert stats.num_accepted_tokens == [token.source for token in answer.tokens].count(attached.drafter)
    assert stats.num_accepted_tokens + stats.num_verify_forwards == stats.num_emitted_tokens == 96
    assert 0 < stats.num_drafts <= stats.num_rounds <= stats.num_verify_forwards
    assert stats.num_draft_tokens >= sum(stats.num_drafted_per_position[:1])
    assert stats.draft_queue_s == 0.0 < stats.draft_forward_s < stats.round_s
    assert 0.0 < stats.verify_forward_s <= answer.duration_s


async def test_info_names_the_drafter_and_the_worker_that_has_it(client: AsyncClient) -> None:
    info = await client.model_info()
    assert set(DRAFTERS) < set(info.drafters)
    assert [worker.drafters for worker in info.verify_workers] == [DRAFTERS]


async def test_the_workers_span_reports_the_tokens_of_attached_rounds(
    client: AsyncClient, attached: Speculation, exported: Any
) -> None:
    answer = await ask(client, attached, temperature=TEMPERATURES[str(attached.drafter)])
    async with asyncio.timeout(20):
        while True:
            spans = [span.attributes for span in exported.get_finished_spans() if names.WORKER_ROLE in span.attributes]
            if spans:
                break
            await asyncio.sleep(0.005)
    (told,) = [span for span in spans if span[names.WORKER_ROLE] == "verify"]
    assert told[names.NUM_ACCEPTED] == answer.speculation.num_accepted_tokens > 0
    assert told[names.NUM_DRAFT_TOKENS] == answer.speculation.num_draft_tokens


@pytest.mark.timeout(600)
@pytest.mark.parametrize("temperature", [0.8, *slow(0.0)])
async def test_a_sequence_continues_with_the_same_tokens_on_a_worker_without_the_drafter(
    pair: Pair, prompts: list[str], temperature: float
) -> None:
    """The worker that has it is killed in mid-stream."""
    config = LocalServicesConfig(
        target=pair.target,
        drafters=(),
        attached_drafters=("ngram",),
        num_verify_workers=2,
        num_attaching=1,
        compile="off",
        prefix_caching=False,
    )
    async with Stack(config) as services:
        plain = [one.output_ids for one in await streamed(services, prompts, temperature, OFF)]
        moved: list[SpeculationStats] = []
        num_tries = 0
        while not any(stats.num_accepted_tokens for stats in moved):
            num_tries += 1
            assert num_tries <= 10, "all answers were over before it died"  # as in a long pause of this process
            drafted = await until_killed(services, prompts, temperature)
            assert [one.output_ids for one in drafted] == plain
            moved = [one.speculation for one in drafted if one.speculation.num_failovers]
            await services.restart_first_verify_worker()
            info = await services.client.model_info()
            assert all(worker.state == "ready" for worker in info.verify_workers)


async def until_killed(services: Stack, prompts: list[str], temperature: float) -> list[Completion]:
    """Answers during which the first verify worker dies, once a stream has brought a token that it drafted."""
    is_drafted = asyncio.Event()
    how = Speculation("ngram", num_draft_tokens=4)
    drafting = asyncio.ensure_future(streamed(services, prompts, temperature, how, is_drafted))
    async with asyncio.timeout(60):
        await is_drafted.wait()
    await services.kill_first_verify_worker()
    return await drafting


async def streamed(
    services: Stack,
    prompts: list[str],
    temperature: float,
    speculation: Speculation,
    is_drafted: asyncio.Event | None = None,
) -> list[Completion]:
    """Four answers at once; `is_drafted`: set when a token of the drafter comes."""
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=120, ignore_eos=True)

    async def answer(prompt: str) -> Completion:
        generation = services.client.generate(prompt, sampling=sampling, speculation=speculation)
        async for piece in generation:
            if is_drafted is not None and any(token.source == "ngram" for token in piece.tokens):
                is_drafted.set()
        return await generation.result()

    return await asyncio.gather(*(answer(prompt) for prompt in prompts[:4]))
