"""Lookahead on real services without any draft model: its own replica of the target, whose text it must not change."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from pair import EMBEDDED, Pair

from betoken.bench.speculation_totals import block_efficiency, draft_forwards_per_round
from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import Completion, InvalidArgumentError

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_PROMPTS, NUM_TOKENS = 3, 48


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(pair: Pair) -> AsyncIterator[Stack]:
    """Services whose draft worker iterates the target's own model, W = 7, N = 5."""
    shape = ("--lookahead-window", "7", "--lookahead-ngram-size", "5")
    patience = ("--draft-timeout-s", "60", "--first-draft-timeout-s", "60")
    config = LocalServicesConfig(
        pair.target, drafters=("lookahead",), compile="off", draft_options=shape, router_options=patience
    )
    async with Stack(config) as running:
        yield running


async def complete(stack: Stack, prompt: str, temperature: float, **how: object) -> Completion:
    return await stack.client.complete(
        prompt, temperature=temperature, seed=5, max_new_tokens=NUM_TOKENS, ignore_eos=True, **how
    )


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_a_replica_drafts_and_changes_no_token(replica: Stack, prompts: list[str], temperature: float) -> None:
    answers = []
    for prompt in prompts[:NUM_PROMPTS]:
        how = {"drafter": "lookahead", "drafter_settings": {"guesses": 7}, "num_draft_tokens": 16}
        drafted = await complete(replica, prompt, temperature, **how)
        plain = await complete(replica, prompt, temperature, off=True)
        assert drafted.output_ids == plain.output_ids
        answers.append(drafted)
    stats = [answer.speculation for answer in answers]
    assert {token.source for answer in answers for token in answer.tokens if token.source} == {"lookahead"}
    assert not any(s.num_failed_drafts for s in stats)
    assert 0.5 < draft_forwards_per_round(stats) <= 1
    assert await replica.all_pages_free()


@pytest.mark.skipif(not EMBEDDED.is_dir(), reason="a random model's text may well repeat nothing")
async def test_lookahead_on_repetitive_text_takes_half_the_rounds(replica: Stack) -> None:
    prompt = "x = 1\n" * 40
    answer = await complete(replica, prompt, 0.0, drafter="lookahead", num_draft_tokens=16)
    assert answer.text and prompt.startswith(answer.text), "the pair goes on otherwise now: another prompt is needed"
    assert block_efficiency([answer.speculation]) > 2


async def test_a_request_may_set_its_own_lookahead_window(replica: Stack, prompts: list[str]) -> None:
    wide = {"window": 15, "ngram_size": 5, "guesses": 15, "steps": 2, "seed_from_prompt": 1}
    answer = await complete(replica, prompts[0], 0.0, drafter="lookahead", drafter_settings=wide, num_draft_tokens=16)
    assert answer.output_ids == (await complete(replica, prompts[0], 0.0, off=True)).output_ids
    assert answer.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("settings", [{"window": 1}, {"ngram_size": 1}, {"guesses": 0}, {"window": 65}])
async def test_bad_lookahead_settings_are_rejected_per_request(
    replica: Stack, prompts: list[str], settings: dict[str, int]
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"drafter.settings.{next(iter(settings))} = "):
        await complete(replica, prompts[0], 0.0, drafter="lookahead", drafter_settings=settings)
