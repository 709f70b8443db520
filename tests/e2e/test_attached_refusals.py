"""A request accepted by one verify worker continues if the next one rejects its drafter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.v1.generation_pb2_grpc import GenerationServiceStub
from tests.drafters.medusa.files import RandomHeads
from tests.e2e.in_process import VOCAB_SIZE, Running, running, save_pair, until_all_pages_are_free
from tests.router.harness import Reply, add_event, request

PROMPT = [40 + n % 9 for n in range(60)]
DRAFTED = {"drafter": "medusa", "drafter_settings": {"adapter": "a"}}
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair, Medusa heads, and an adapter."""
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    RandomHeads(32, VOCAB_SIZE).save(folder / "heads", "v1")
    RandomHeads(32, VOCAB_SIZE).save(folder / "adapters" / "a", "lorax")
    return folder


@asynccontextmanager
async def two_workers(folder: Path, drafters: tuple[str, ...] = ("model",)) -> AsyncIterator[Running]:
    """The first one has adapters, the other one refuses them."""
    heads: dict[str, Any] = {"attached_drafters": ("medusa",), "medusa": folder / "heads", "max_prefill_tokens": 16}
    first = heads | {"adapter_dir": folder / "adapters"}
    async with running(folder, {"drafters": drafters}, first, other_verify_options=[heads]) as stack:
        yield stack


async def answers(stack: Running, n: int = 1, **fields: Any) -> list[Reply]:
    replies = [Reply() for _ in range(n)]
    asked = {"prompt_ids": PROMPT, "max_new_tokens": NUM_TOKENS, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    async with grpc.aio.insecure_channel(stack.address) as channel:
        async for event in GenerationServiceStub(channel).Generate(request(**asked | fields, n=n), timeout=120):
            add_event(replies[event.answer], event)
    await until_all_pages_are_free(stack.client)  # so that the first worker is the next one's, too
    return replies


def reported(replies: list[Reply]) -> list[object]:
    return [(reply.ids, reply.prompt) for reply in replies]


@pytest.mark.parametrize("num_steps", [0, 1, 12], ids=["before its prompt", "within its prompt", "within its answer"])
async def test_an_answer_continues_if_the_next_worker_rejects_its_drafter_settings(
    folder: Path, num_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with two_workers(folder) as stack:
        plain = await answers(stack, off=True, prompt_logprobs=0)
        stack.verify_hold.after(num_steps)
        lost = asyncio.ensure_future(answers(stack, **DRAFTED, prompt_logprobs=0))
        await stack.verify_hold.reached()
        with caplog.at_level(logging.WARNING):
            await stack.lose_verify()
            drafted = await lost
        assert reported(drafted) == reported(plain)
        stats = drafted[0].finish.speculation
        assert (stats.num_failovers, stats.num_failed_drafts) == (1, 1)
        assert "goes on without the attached drafter: drafter.settings.adapter" in caplog.text


async def test_further_answers_continue_if_another_worker_rejects_their_drafter(folder: Path) -> None:
    async with two_workers(folder) as stack:
        plain = await answers(stack, 4, off=True)
        drafted = await answers(stack, 4, **DRAFTED)
        assert reported(drafted) == reported(plain)
        assert sum(reply.finish.speculation.num_failed_drafts for reply in drafted) > 0
        assert drafted[0].finish.speculation.num_draft_tokens > 0


async def test_a_resumed_answer_continues_and_a_new_one_is_rejected(folder: Path) -> None:
    async with two_workers(folder) as stack:
        (plain,) = await answers(stack, off=True, prompt_logprobs=0)
        await stack.lose_verify()
        fingerprint = {"system_fingerprint": plain.start.system_fingerprint}
        for fields in (
            {"resume_ids": plain.ids[:9]},
            {"resume_prompt_logprobs": 20, "prompt_logprobs": 0},
            fingerprint,
        ):
            (reply,) = await answers(stack, **DRAFTED, **fields)
            assert [*fields.get("resume_ids", ()), *reply.ids] == plain.ids
            assert reply.finish.speculation.num_failed_drafts == 1
        for fields in ({}, {"prompt_logprobs": 0}):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await answers(stack, **DRAFTED, **fields)
            error = from_rpc_error(failed.value)
            assert isinstance(error, InvalidArgumentError) and error.field == "speculation.drafter.settings.adapter"


async def test_drafts_of_a_draft_worker_take_over(folder: Path) -> None:
    """It hosts a drafter of that name whose settings are good there."""
    ngram = {"attached_drafters": ("ngram",)}
    async with running(folder, {"drafters": ("ngram",)}, ngram, other_verify_options=[{}]) as stack:
        asked = {"temperature": 0.0, "max_new_tokens": 120}
        plain = await answers(stack, **asked, off=True)
        stack.verify_hold.after(8)
        lost = asyncio.ensure_future(answers(stack, **asked, drafter="ngram", num_draft_tokens=4))
        await stack.verify_hold.reached()
        await stack.lose_verify()
        drafted = await lost
        assert reported(drafted) == reported(plain)
        assert drafted[0].finish.speculation.num_draft_tokens > 0
