"""The drafter `auto` changes no token: forced changes between attached, remote and no drafts, and workers lost."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from betoken.client import AsyncClient, Completion
from betoken.common.economy.source_rates import SequenceRates
from betoken.router.round.attached_rounds import AttachedRounds
from betoken.router.round.speculation_policies import DraftSource
from tests.e2e.attached import save_attached
from tests.e2e.in_process import Running, running, until_all_pages_are_free

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT_IDS = [5, 6, 7, 5, 6]
DRAFT: dict[str, Any] = {"drafters": ("model", "ngram")}
NO_SOURCE = DraftSource("", False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """Services of a random pair with attached and remote drafters."""
    folder = tmp_path_factory.mktemp("pair")
    async with running(folder, DRAFT, save_attached(folder) | {"num_pages": 40}) as made:
        yield made


class RandomChoice:
    """Selects a random source, or none, every few tokens. New kinds of changes come first."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.changes: set[tuple[DraftSource, DraftSource]] = set()

    def __call__(self, rates: SequenceRates[DraftSource], candidates: dict[DraftSource, Any], level: int) -> Any:
        before, options = rates.current or NO_SOURCE, [*candidates, NO_SOURCE]
        new = [one for one in options if (kind_of(before), kind_of(one)) not in self.kinds]
        chosen = rates.current = self.rng.choice(new or options)
        rates.base = self.rng.choice([None, before])
        rates._num_since_choice = self.rng.choice((8, 12, 15))
        self.changes.add((before, chosen))
        return chosen

    @property
    def kinds(self) -> set[tuple[str, str]]:
        """Changes between attached, remote and no sources."""
        return {(kind_of(before), kind_of(after)) for before, after in self.changes}


def kind_of(source: DraftSource) -> str:
    if not source.name:
        return "none"
    return "attached" if source.is_attached else "remote"


async def answers(client: AsyncClient, temperature: float, **how: Any) -> list[Completion]:
    """Answers to six requests at once."""
    fields = {"temperature": temperature, "max_new_tokens": 64, "ignore_eos": True, "logprobs": 2} | how
    requests = [client.complete_all([*PROMPT_IDS, seed], seed=seed, **fields) for seed in range(6)]
    return [one for answered in await asyncio.gather(*requests) for one in answered]


def reported(completions: list[Completion]) -> list[object]:
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in completions]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "how",
    [{}, {"n": 2}, {"constraint": {"regex": "([a-z]{1,9} ){9}"}, "ignore_eos": False}, {"repetition_penalty": 1.3}],
    ids=["usual", "parallel", "constraint", "penalty"],
)
async def test_changes_between_all_sources_change_no_token(
    services: Running, monkeypatch: pytest.MonkeyPatch, temperature: float, how: dict[str, Any]
) -> None:
    expected = await answers(services.client, temperature, off=True, **how)
    choice = RandomChoice(round(10 * temperature))
    monkeypatch.setattr(SequenceRates, "choose", lambda *arguments: choice(*arguments))
    given = await answers(services.client, temperature, drafter="auto", num_draft_tokens=3, **how)
    assert reported(given) == reported(expected)
    if "constraint" not in how:
        assert choice.kinds >= {(a, b) for a in ("attached", "remote", "none") for b in ("attached", "remote", "none")}
    await until_all_pages_are_free(services.client)


async def test_auto_tries_every_source_and_its_answers_equal_decoding(services: Running) -> None:
    expected = await answers(services.client, 0.8, off=True, max_new_tokens=160)
    used: set[str] = set()
    for _ in range(20):  # trials follow each other, one a sequence
        given = await answers(services.client, 0.8, max_new_tokens=160)
        assert reported(given) == reported(expected)
        used |= {token.source for one in given for token in one.tokens if token.source}
        if used >= {"model", "ngram", "medusa"}:
            break
    assert used >= {"model", "ngram", "medusa"}


async def test_auto_survives_the_loss_of_the_draft_worker_then_of_a_verify_worker(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = save_attached(tmp_path)
    async with running(tmp_path, DRAFT, options, other_verify_options=[{"attached_drafters": ("ngram",)}]) as services:
        expected = await answers(services.client, 0.8, off=True)
        choice = RandomChoice(1)
        monkeypatch.setattr(SequenceRates, "choose", lambda *arguments: choice(*arguments))
        services.verify_hold.after(8)
        given = asyncio.ensure_future(answers(services.client, 0.8, num_draft_tokens=3))
        async with asyncio.timeout(120):
            await services.verify_hold.reached()
            await services.lose_draft()
            services.verify_hold.resume(4)
            await services.verify_hold.reached()
            await services.lose_verify()
            answered = await given
        assert reported(answered) == reported(expected)
        assert sum(one.speculation.num_failovers for one in answered)


async def test_auto_rounds_are_granted_in_small_parts(services: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a sequence could change its attached drafter for a remote one after a whole grant only."""
    granted: list[int] = []
    renew = AttachedRounds.renew

    def noted(rounds: AttachedRounds, session: Any, length: int, room: int, most: int) -> None:
        renew(rounds, session, length, room, most)
        granted.append(session.granted.num_tokens)

    monkeypatch.setattr(AttachedRounds, "renew", noted)
    monkeypatch.setattr(SequenceRates, "choose", lambda rates, candidates, level: DraftSource("ngram", True))
    await answers(services.client, 0.0)
    assert 0 < max(granted) <= 64


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_grants_that_become_shorter_change_no_token(
    services: Running, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """Otherwise the result of an attached round would be taken for the answer to a remote draft."""
    expected = await answers(services.client, temperature, off=True)
    rng, renew = random.Random(round(10 * temperature)), AttachedRounds.renew

    def renewed(rounds: AttachedRounds, session: Any, length: int, room: int, most: int) -> None:
        renew(rounds, session, length, room, rng.choice((4, 64)))

    monkeypatch.setattr(AttachedRounds, "renew", renewed)
    choice = RandomChoice(round(10 * temperature))
    monkeypatch.setattr(SequenceRates, "choose", lambda *arguments: choice(*arguments))
    given = await answers(services.client, temperature, drafter="auto", num_draft_tokens=3)
    assert reported(given) == reported(expected)
    assert not any(one.speculation.num_failovers for one in given)
