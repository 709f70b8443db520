"""Overlapped rounds change no token: all kinds of requests, disturbed links, and workers lost in the middle.

With a draft model that drafts token by token, and with a PARD model.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from betoken.client import AsyncClient, Completion
from betoken.router.workers.draft_session import DraftSession
from betoken.v1.draft_pb2 import DraftedBlock
from tests.e2e.in_process import Running, running, save_pair, until_all_pages_are_free
from tests.e2e.setups import save_pard

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT_IDS = [5, 6, 7, 5, 6]
FEW_PAGES: dict[str, Any] = {"num_pages": 20}
"""Fewer than eight answers need at once: sequences are preempted."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[save_pair, save_pard])
async def services(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    """Services of a random pair with overlapped rounds."""
    folder = tmp_path_factory.mktemp("pair")
    request.param(folder)
    async with running(folder, verify_options=FEW_PAGES, router_options={"overlap": "on"}) as made:
        yield made


async def answers(client: AsyncClient, temperature: float, **how: Any) -> list[Completion]:
    """Answers to eight requests at once."""
    fields = {"temperature": temperature, "max_new_tokens": 48, "ignore_eos": True} | how
    requests = [client.complete_all([*PROMPT_IDS, seed], seed=seed, **fields) for seed in range(8)]
    return [one for answered in await asyncio.gather(*requests) for one in answered]


async def compared(client: AsyncClient, temperature: float, drafter: str = "model", **how: Any) -> list[Completion]:
    """The answers with overlapped rounds, equal to those without speculation."""
    plain = {name: value for name, value in how.items() if name != "prediction"}
    expected = await answers(client, temperature, off=True, **plain)
    given = await answers(client, temperature, drafter=drafter, num_draft_tokens=3, **how)
    assert [one.output_ids for one in given] == [one.output_ids for one in expected]
    return given


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"n": 2},
        {"constraint": {"regex": "([a-z]{1,9} ){9}"}, "ignore_eos": False},
        {"drafter": "fused", "prediction": PROMPT_IDS * 9},
        {"repetition_penalty": 1.3, "logit_bias": {9: 2.0}},
    ],
    ids=["plain", "parallel", "constraint", "prediction", "penalty"],
)
async def test_overlapped_answers_equal_decoding(services: Running, temperature: float, how: dict[str, Any]) -> None:
    given = await compared(services.client, temperature, **how)
    if "drafter" not in how:
        assert sum(one.speculation.num_ahead_hits + one.speculation.num_ahead_misses for one in given)
    assert sum(worker.preemptions for worker in (await services.client.model_info()).verify_workers)


async def test_overlapped_answers_equal_decoding_after_hits_and_misses(services: Running) -> None:
    num_hits = num_misses = 0
    for _ in range(20):  # whether the drafter finds time to draft ahead is up to the machine
        given = await compared(services.client, 0.0)
        num_hits += sum(one.speculation.num_ahead_hits for one in given)
        num_misses += sum(one.speculation.num_ahead_misses for one in given)
        if num_hits and num_misses:
            break
    assert num_hits and num_misses


async def test_cancelled_overlapped_answers_disturb_no_other(services: Running) -> None:
    client = services.client

    async def cancelled(seed: int) -> None:
        generation = client.generate(PROMPT_IDS, seed=seed, max_new_tokens=100, ignore_eos=True, drafter="model")
        async for piece in generation:
            if piece.tokens and seed % 4 < len(piece.tokens):
                break
        generation.cancel()

    _, *_ = await asyncio.gather(compared(client, 0.8), *map(cancelled, range(8)))
    await until_all_pages_are_free(client)


@pytest.mark.parametrize("seed", [0, 1])
async def test_stale_and_duplicate_frames_of_the_draft_worker_change_no_token(
    services: Running, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng, deliver, num_repeated = random.Random(seed), DraftSession.deliver, count()
    earlier: list[DraftedBlock] = []

    def disturbed(session: DraftSession, block: DraftedBlock) -> None:
        """Deliver a draft, then perhaps this or an earlier one again, as a response or as a pushed draft."""
        copy = DraftedBlock()
        copy.CopyFrom(block)
        earlier.append(copy)
        deliver(session, block)
        if rng.random() < 0.3:
            again = DraftedBlock()
            again.CopyFrom(rng.choice([copy, rng.choice(earlier)]))
            again.is_ahead ^= rng.random() < 0.3
            next(num_repeated)
            deliver(session, again)

    monkeypatch.setattr(DraftSession, "deliver", disturbed)
    await compared(services.client, 0.8 * seed)
    assert next(num_repeated) > 8


@pytest.mark.parametrize("save", [save_pair, save_pard])
async def test_overlapped_answers_survive_the_loss_of_the_draft_worker_then_of_a_verify_worker(
    tmp_path: Path, save: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft worker is lost when it has pushed drafts whose verification has not ended."""
    pushed, deliver = asyncio.Event(), DraftSession.deliver

    def noticed(session: DraftSession, block: DraftedBlock) -> None:
        deliver(session, block)
        if block.is_ahead:
            pushed.set()

    save(tmp_path)
    async with running(tmp_path, router_options={"overlap": "on"}, other_verify_options=[{}]) as services:
        expected = await answers(services.client, 0.8, off=True)
        monkeypatch.setattr(DraftSession, "deliver", noticed)
        services.verify_hold.after(8)
        given = asyncio.ensure_future(answers(services.client, 0.8, drafter="model", num_draft_tokens=3))
        async with asyncio.timeout(120):
            await services.verify_hold.reached()
            await pushed.wait()
            await services.lose_draft()
            services.verify_hold.resume(2)
            await services.verify_hold.reached()
            await services.lose_verify()
            answered = await given
        assert [one.output_ids for one in answered] == [one.output_ids for one in expected]
        assert sum(one.speculation.num_failovers for one in answered)
