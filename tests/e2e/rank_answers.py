"""Answers of workers with several ranks, and the end of their processes."""

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from betoken.client import AsyncClient
from tests.e2e.schemas import PERSON

TIMEOUT_S = 120.0
CASES: dict[str, dict[str, Any]] = {
    "off": {"off": True},
    "model": {"drafter": "model", "num_draft_tokens": 4},
    "tree of a model": {"drafter": "model", "drafter_settings": {"max_branches": 3}, "num_draft_tokens": 6},
    "tree of n-grams": {"drafter": "ngram", "num_draft_tokens": 8},
    "constraint": {"drafter": "model", "num_draft_tokens": 4, "constraint": {"json_schema": PERSON}},
    "prompt of before": {"off": True},
}
QUESTIONS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(5)]


async def answers(client: AsyncClient, case: dict[str, Any]) -> list[Any]:
    """Ids and logprobs of answers to all questions at once, which need more pages than there are."""
    options = {"temperature": 0.8, "max_new_tokens": 20, "logprobs": 2, "timeout_s": TIMEOUT_S}
    options |= {} if "constraint" in case else {"ignore_eos": True}
    calls = [client.complete(text, seed=seed, **options, **case) for seed, text in enumerate(QUESTIONS)]
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in await asyncio.gather(*calls)]


@pytest.fixture(autouse=True)
def compilers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process compiles for other tests after the services in it have ended."""
    for module in ("betoken.verify_worker.service", "betoken.draft_worker.model_hosting"):
        monkeypatch.setattr(f"{module}.give_up", lambda: None)


def check_ended(pids: set[int]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while has_process(pids) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert not has_process(pids)


def has_process(pids: set[int]) -> bool:
    """Whether one of them runs; an ended one may wait for its parent."""
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return True
    return False
