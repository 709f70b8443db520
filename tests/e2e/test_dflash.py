"""Block drafters attached to the verify worker, over real services: the plain tokens in fewer forwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from betoken.client import Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from tests.e2e.attached import PROMPTS, answers, reported
from tests.e2e.in_process import running, services
from tests.e2e.setups import save_dflash

OFF = Speculation(off=True)


def save_all(folder: Path, variant: str = "dflash", *drafters: str, **fields: Any) -> dict[str, Any]:
    """The tiny pair and a random block drafter for its target; the options of a verify worker that has it attached."""
    return {"attached_drafters": drafters or ("ngram", "dflash")} | save_dflash(folder, variant, **fields)


async def test_modes_with_block_drafts_repeat_whatever_is_cached(tmp_path: Path) -> None:
    async with services(tmp_path, {"drafters": ("model",)}, save_all(tmp_path, "dspark")) as client:
        prompts = [prompt * 3 for prompt in PROMPTS[:3]]
        for mode in (VerificationMode.REJECTION, VerificationMode.TYPICAL):
            speculation = Speculation("dflash", mode=mode, num_draft_tokens=4)
            first = await answers(client, speculation, 0.8, prompts)
            assert reported(await answers(client, speculation, 0.8, prompts)) == reported(first)
            assert sum(one.speculation.num_draft_tokens for one in first) > 0


async def test_after_the_worker_with_the_block_drafter_is_lost_the_tokens_are_the_same(tmp_path: Path) -> None:
    verify = save_all(tmp_path, "dflash", "fused", "dflash", "ngram")
    async with running(tmp_path, {"drafters": ("model",)}, verify, other_verify_options=[{}]) as stack:
        for drafter in ("fused", "dflash"):
            plain = reported(await answers(stack.client, OFF, 0.8, PROMPTS[:2], max_new_tokens=60))
            drafted = await answers(stack.client, Speculation(drafter), 0.8, PROMPTS[:2], max_new_tokens=60)
            assert reported(drafted) == plain
        stack.verify_hold.after(12)
        asking = answers(stack.client, Speculation("dflash", num_draft_tokens=4), 0.8, PROMPTS[:2], max_new_tokens=60)
        waiting = asyncio.ensure_future(asking)
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert reported(lost) == plain and sum(one.speculation.num_failovers for one in lost) > 0


async def test_a_block_drafter_of_another_target_stops_the_start_by_name(tmp_path: Path) -> None:
    options = save_all(tmp_path, target_hidden_size=64, hidden_size=64)
    with pytest.raises(FailedPreconditionError, match=r"--dflash = .*hidden_size: 64: must be 32, the target's"):
        async with services(tmp_path, {"drafters": ("model",)}, options):
            pass
