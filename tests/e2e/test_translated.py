"""Draft models with another tokenizer than the target's change no token, and their drafts are accepted."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from betoken.client import Completion
from betoken.router.workers.draft_session import DraftSession
from betoken.v1.draft_pb2 import DraftedBlock
from tests.drafters.translated.pairs import save_translated_pair
from tests.e2e.in_process import Running, running, until_all_pages_are_free

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPTS = ["def fibonacci(n):\n    ", "class Stack:\n    def push(self, caf\u00e9):\n"]
NUM_TOKENS = 24


def options(folder: Path) -> dict[str, Any]:
    return {"target_tokenizer": str(folder / "target"), "drafters": ("model", "ngram", "staged", "fused")}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tokens", "text"])
async def services(tmp_path_factory: pytest.TempPathFactory, request: Any) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("pair")
    save_translated_pair(folder, request.param)
    async with running(folder, options(folder)) as made:
        (worker,) = (await made.client.model_info()).draft_workers
        assert worker.translation is not None and worker.translation.is_by_token == (request.param == "tokens")
        yield made


async def answers(services: Running, temperature: float, **how: Any) -> list[Completion]:
    """Answers to all prompts at once."""
    fields = {"temperature": temperature, "max_new_tokens": NUM_TOKENS, "ignore_eos": True} | how
    requests = [services.client.complete(prompt, seed=seed, **fields) for seed, prompt in enumerate(PROMPTS)]
    return await asyncio.gather(*requests)


@pytest.mark.parametrize(("drafter", "temperature"), [("model", 0.0), ("model", 0.8), ("staged", 0.8), ("fused", 0.0)])
async def test_translated_drafts_are_accepted_and_change_no_token(
    services: Running, drafter: str, temperature: float
) -> None:
    expected = await answers(services, temperature, off=True)
    given = await answers(services, temperature, drafter=drafter, num_draft_tokens=4)
    assert [one.output_ids for one in given] == [one.output_ids for one in expected]
    assert sum(one.speculation.num_accepted_tokens for one in given) > 4
    assert sum(one.speculation.num_draft_tokens for one in given) > 2 * sum(s.speculation.num_drafts for s in given)
    assert not any(one.speculation.num_failed_drafts for one in given)
    await until_all_pages_are_free(services.client)


@pytest.mark.parametrize(
    "how",
    [
        {"constraint": {"regex": "[a-z]{1,9}( [a-z]{1,9}){9}"}, "ignore_eos": False},
        {"repetition_penalty": 1.3, "logit_bias": {9: 2.0}},
        {"drafter_settings": {"max_branches": 3}},
        {"n": 2},
    ],
    ids=["constraint", "penalty", "tree", "parallel"],
)
async def test_translated_drafts_follow_a_requests_rules(services: Running, how: dict[str, Any]) -> None:
    plain = {name: value for name, value in how.items() if name != "drafter_settings"}
    fields = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3}
    expected = await services.client.complete_all(PROMPTS[0], off=True, **fields | plain)
    given = await services.client.complete_all(PROMPTS[0], drafter="model", num_draft_tokens=6, **fields | how)
    assert [one.output_ids for one in given] == [one.output_ids for one in expected]
    assert sum(one.speculation.num_drafts for one in given) and not given[0].speculation.num_failed_drafts


@pytest.mark.parametrize("mode", ["rejection", "typical"])
async def test_translated_drafts_serve_the_other_modes(services: Running, mode: str) -> None:
    given = await answers(services, 0.8, mode=mode, drafter="model", num_draft_tokens=4)
    again = await answers(services, 0.8, mode=mode, drafter="model", num_draft_tokens=4)
    assert [one.output_ids for one in given] == [one.output_ids for one in again]
    assert sum(one.speculation.num_accepted_tokens for one in given)


async def test_answers_stay_the_same_if_the_translating_worker_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_drafted, deliver = asyncio.Event(), DraftSession.deliver

    def noticed(session: DraftSession, block: DraftedBlock) -> None:
        deliver(session, block)
        if block.ids:
            is_drafted.set()

    save_translated_pair(tmp_path, "text")
    async with running(tmp_path, options(tmp_path)) as services:
        expected = await answers(services, 0.8, off=True)
        monkeypatch.setattr(DraftSession, "deliver", noticed)
        services.verify_hold.after(4)
        given = asyncio.ensure_future(answers(services, 0.8, drafter="model", num_draft_tokens=4))
        async with asyncio.timeout(120):
            await services.verify_hold.reached()
            await is_drafted.wait()
            await services.lose_draft()
            services.verify_hold.release()
            answered = await given
    assert [one.output_ids for one in answered] == [one.output_ids for one in expected]
