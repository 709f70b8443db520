"""Gemma-4 assistants attached to the verify worker, over real services: the plain tokens in fewer forwards."""

from pathlib import Path
from typing import Any

import pytest

from betoken.client import Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from tests.e2e.attached import PROMPTS, answers, reported
from tests.e2e.in_process import save_pair, services
from tests.e2e.setups import save_gemma4

NAME = "gemma4_assistant"
OFF = Speculation(off=True)
DRAFT = {"drafters": ("ngram",)}


def save_all(folder: Path) -> dict[str, Any]:
    """A tiny target and a random assistant for it; the options of a verify worker that has it attached."""
    return {"attached_drafters": ("ngram", NAME)} | save_gemma4(folder)


async def test_typical_answers_with_a_gemma4_assistant_repeat_in_spite_of_preemption(tmp_path: Path) -> None:
    verify = save_all(tmp_path) | {"attached_drafters": ("fused", NAME, "ngram"), "num_pages": 8, "max_context": 100}
    speculation = Speculation("fused", mode=VerificationMode.TYPICAL, num_draft_tokens=4)
    async with services(tmp_path, DRAFT, verify) as client:
        together = await answers(client, speculation, 0.8, PROMPTS[:4], max_new_tokens=28)
        assert sum(worker.preemptions for worker in (await client.model_info()).verify_workers) > 0
        alone = [(await answers(client, speculation, 0.8, [prompt], max_new_tokens=28))[0] for prompt in PROMPTS[:4]]
        assert reported(together) == reported(alone)
        assert sum(one.speculation.num_draft_tokens for one in alone) > 0


async def test_a_gemma4_assistant_of_another_family_stops_the_start_by_name(tmp_path: Path) -> None:
    options = save_all(tmp_path)
    save_pair(tmp_path)
    with pytest.raises(FailedPreconditionError, match="--gemma4-assistant = .*: model_type: 'llama': must be one of"):
        async with services(tmp_path, DRAFT, options):
            pass
