"""A PARD model attached to the verify worker, over real services: the plain tokens in fewer forwards."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from betoken.client import Sampling, Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from tests.e2e.attached import PROMPTS, answers, assert_distributed_as_plain, reported
from tests.e2e.in_process import running, services
from tests.e2e.setups import save_pard, save_pard2
from tests.router.harness import with_special_tokens

OFF = Speculation(off=True)
DRAFT = {"drafters": ("ngram",)}


KINDS = {"pard": save_pard, "pard2": save_pard2}


def save_all(folder: Path, *drafters: str, kind: str = "pard") -> dict[str, Any]:
    """The tiny pair, whose draft is a PARD model; the options of a verify worker that has it attached."""
    return {"attached_drafters": drafters or ("ngram", "pard")} | KINDS[kind](folder)


@pytest.mark.parametrize("kind", KINDS)
async def test_constrained_answers_with_an_attached_pard_model_are_the_plain_ones(tmp_path: Path, kind: str) -> None:
    """The prompt takes the model several forwards, between which the target goes on with the grammar."""
    verify = save_all(tmp_path, kind=kind) | {"max_prefill_tokens": 4}
    sampling = Sampling(temperature=0.8, seed=3, max_new_tokens=40)
    async with services(tmp_path, DRAFT, verify) as client:
        plain, drafted = [
            await client.complete(PROMPTS[0], sampling=sampling, speculation=how, constraint={"regex": "[a-d]{30}"})
            for how in (OFF, Speculation("pard", num_draft_tokens=4))
        ]
        assert drafted.output_ids == plain.output_ids and len(plain.output_ids) > 20
        assert drafted.speculation.num_accepted_tokens > 0
        assert drafted.speculation.num_failed_drafts == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_modes_take_drafts_of_an_attached_pard_model_and_repeat(tmp_path: Path, kind: str) -> None:
    async with services(tmp_path, DRAFT, save_all(tmp_path, kind=kind)) as client:
        greedy = reported(await answers(client, OFF, 0.0, PROMPTS[:3]))
        for mode in (VerificationMode.REJECTION, VerificationMode.TYPICAL):
            speculation = Speculation("pard", mode=mode, num_draft_tokens=4)
            first = await answers(client, speculation, 0.8, PROMPTS[:3])
            assert reported(await answers(client, speculation, 0.8, PROMPTS[:3])) == reported(first)
            assert sum(one.speculation.num_accepted_tokens for one in first) > 0
            if mode is VerificationMode.REJECTION:
                assert reported(await answers(client, speculation, 0.0, PROMPTS[:3])) == greedy


async def test_rejection_with_an_attached_pard_models_probabilities_keeps_the_targets_distribution(
    tmp_path: Path,
) -> None:
    async with services(tmp_path, DRAFT, save_all(tmp_path)) as client:
        rejection = Speculation("pard", num_draft_tokens=3, mode=VerificationMode.REJECTION)
        await assert_distributed_as_plain(client, rejection, 360)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_without_the_pard_model_goes_on_with_the_same_tokens(tmp_path: Path, kind: str) -> None:
    verify = save_all(tmp_path, "fused", "pard", "ngram", kind=kind)
    async with running(tmp_path, DRAFT, verify, other_verify_options=[{}]) as stack:
        plain = reported(await answers(stack.client, OFF, 0.8, PROMPTS[:4], max_new_tokens=60))
        fused = await answers(stack.client, Speculation("fused"), 0.8, PROMPTS[:4], max_new_tokens=60)
        assert reported(fused) == plain
        stack.verify_hold.after(10)  # of five tokens at most: no answer is over
        speculation = Speculation("pard", num_draft_tokens=4)
        waiting = asyncio.ensure_future(answers(stack.client, speculation, 0.8, PROMPTS[:4], max_new_tokens=60))
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert reported(lost) == plain
        assert sum(one.speculation.num_failovers for one in lost) > 0


async def test_a_pard_model_with_another_tokenizer_stops_the_start_by_name(tmp_path: Path) -> None:
    options = save_all(tmp_path)
    file = tmp_path / "draft" / "tokenizer.json"
    file.write_text(with_special_tokens(file.read_text(), "<other>"))
    with pytest.raises(FailedPreconditionError, match=r"--pard = .*: tokenizer.json: must be the target's"):
        async with services(tmp_path, DRAFT, options):
            pass
