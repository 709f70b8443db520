"""Each drafter gives the plain tokens: chains and trees of all lengths, one and eight streams, both dtypes, greedy and
sampled, with preemption, and after the loss of the worker that runs it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from betoken.client import AsyncClient, Completion, Speculation
from tests.e2e.attached import PROMPTS, answers, reported
from tests.e2e.in_process import running, until_all_pages_are_free
from tests.e2e.setups import SETUPS, Setup
from tests.products import covering

CASES = ((0.8, 4, 3, 8), (0.0, None, 1, 8), (0.8, 1, 1, 1), (0.0, 8, 3, 1))
"""Temperature, number of draft tokens, branches, streams."""
OFF = Speculation(off=True)


async def drafted(client: AsyncClient, setup: Setup, case: Sequence[Any]) -> list[Completion]:
    """Answers of a case."""
    temperature, num_draft_tokens, branches, num_streams = case
    settings = {"max_branches": branches} if setup.can_branch else {}
    speculation = Speculation(setup.drafter, settings, num_draft_tokens)
    return await answers(client, speculation, temperature, PROMPTS[:num_streams], max_new_tokens=24)


@pytest.mark.parametrize(("name", "dtype"), covering(SETUPS, ("float32", "bfloat16"), strength=1))
async def test_each_drafter_gives_the_plain_tokens_whatever_happens(tmp_path: Path, name: str, dtype: str) -> None:
    setup = SETUPS[name]
    pages = {"dtype": dtype, "num_pages": 8, "max_context": 100}  # so few that streams are preempted
    spare = pages | {"attached_drafters": "none"}
    verify = pages | {"attached_drafters": setup.drafter if setup.is_attached else "none"} | setup.save(tmp_path)
    async with running(tmp_path, setup.draft_options(tmp_path), verify, other_verify_options=[spare]) as stack:
        client, num_accepted = stack.client, 0
        plain = {t: reported(await answers(client, OFF, t, max_new_tokens=24)) for t in (0.0, 0.8)}
        for case in CASES:
            completions = await drafted(client, setup, case)
            assert reported(completions) == plain[case[0]][: len(completions)], case
            assert sum(one.speculation.num_failed_drafts for one in completions) == 0, case
            num_accepted += sum(one.speculation.num_accepted_tokens for one in completions)
        assert num_accepted > 0
        assert sum(worker.preemptions for worker in (await client.model_info()).verify_workers) > 0
        await until_all_pages_are_free(client)
        stack.verify_hold.after(4)  # of five tokens at most: no answer is over
        waiting = asyncio.ensure_future(drafted(client, setup, CASES[0]))
        await stack.verify_hold.reached()
        await (stack.lose_verify() if setup.is_attached else stack.lose_draft())
        stack.verify_hold.release()
        lost = await waiting
        assert reported(lost) == plain[0.8]
        if setup.is_attached:
            assert sum(one.speculation.num_failovers for one in lost) > 0
