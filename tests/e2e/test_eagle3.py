"""An EAGLE-3 layer attached to the verify worker, over real services: the plain tokens in fewer forwards."""

import asyncio
import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from betoken.client import InvalidArgumentError, Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from betoken.drafters.fused import drafter as fused
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.e2e.attached import PROMPTS, answers, assert_distributed_as_plain, reported, save_eagle3
from tests.e2e.in_process import VOCAB_SIZE, running, save_pair, services, until_all_pages_are_free

SHAPES = ((None, 4), (8, 1), (None, 1), (1, 4), (4, 4))
"""Numbers of draft tokens and branches: chains and trees, long and short."""


def save_all(folder: Path, *drafters: str) -> dict[str, Any]:
    """The tiny pair and a random layer for its target; the options of a verify worker that has it attached."""
    save_pair(folder)
    return {"attached_drafters": drafters or ("ngram", "eagle3")} | save_eagle3(folder)


@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 24), ("bfloat16", 256)])
async def test_eagle3_trees_and_chains_give_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    """With 24 pages sequences are preempted, and the layer receives their states again."""
    verify = save_all(tmp_path) | {"dtype": dtype, "num_pages": num_pages, "max_context": 200}
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        assert "eagle3" in (await client.model_info()).drafters
        num_accepted = 0
        shapes = SHAPES if dtype == "float32" else SHAPES[::2]
        for temperature in (0.0, 0.8):
            for prompts in (PROMPTS[:1], PROMPTS):
                plain = reported(await answers(client, Speculation(off=True), temperature, prompts, max_new_tokens=28))
                for num_draft_tokens, branches in shapes[: 1 if len(prompts) == 1 else None]:
                    speculation = Speculation("eagle3", {"max_branches": branches}, num_draft_tokens)
                    drafted = await answers(client, speculation, temperature, prompts, max_new_tokens=28)
                    assert reported(drafted) == plain, (temperature, num_draft_tokens, branches)
                    assert sum(one.speculation.num_failed_drafts for one in drafted) == 0
                    tokens = [token for one in drafted for token in one.tokens if token.source]
                    assert {token.source for token in tokens} <= {"eagle3"}
                    num_accepted += len(tokens)
        assert num_accepted > 0
        preemptions = sum(worker.preemptions for worker in (await client.model_info()).verify_workers)
        assert (preemptions > 0) == (num_pages == 24)
        await until_all_pages_are_free(client)


async def test_a_layer_of_the_first_generation_drafts(tmp_path: Path) -> None:
    shape = tiny_shape(
        version=1, hidden_size=32, target_hidden_size=32, vocab_size=VOCAB_SIZE, draft_vocab_size=VOCAB_SIZE
    )
    layer = save_layer(tmp_path / "eagle1", tiny_layer(shape, spread=0.4), "safeailab")
    verify = save_all(tmp_path, "eagle3") | {"eagle3": str(layer)}
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        plain = await answers(client, Speculation(off=True), 0.8)
        drafted = await answers(client, Speculation("eagle3", num_draft_tokens=4), 0.8)
        assert reported(drafted) == reported(plain)
        assert {token.source for one in drafted for token in one.tokens if token.source} == {"eagle3"}


async def test_modes_with_eagle3_repeat_whatever_is_cached(tmp_path: Path) -> None:
    """The layer's state of a text does not depend on the content of the worker's pages."""
    async with services(tmp_path, {"drafters": ("model",)}, save_all(tmp_path)) as client:
        prompts = [prompt * 3 for prompt in PROMPTS[:4]]
        greedy = reported(await answers(client, Speculation(off=True), 0.0, prompts))
        for mode in (VerificationMode.REJECTION, VerificationMode.TYPICAL):
            speculation = Speculation("eagle3", mode=mode, num_draft_tokens=4)
            first = await answers(client, speculation, 0.8, prompts)
            assert reported(await answers(client, speculation, 0.8, prompts)) == reported(first)
            assert sum(one.speculation.num_draft_tokens for one in first) > 0
            if mode is VerificationMode.REJECTION:
                assert reported(await answers(client, speculation, 0.0, prompts)) == greedy


async def test_rejection_with_the_layers_own_probabilities_keeps_the_targets_distribution(tmp_path: Path) -> None:
    """The first token comes with the prompt, the second is of the first draft."""
    rejection = Speculation("eagle3", num_draft_tokens=3, mode=VerificationMode.REJECTION)
    verify = save_all(tmp_path) | save_eagle3(tmp_path, seed=1)  # of whose tokens the target takes some
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        await assert_distributed_as_plain(client, rejection, 600)


async def test_a_worker_without_the_layer_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    verify = save_all(tmp_path)
    async with running(tmp_path, {"drafters": ("model",)}, verify, other_verify_options=[{}]) as stack:
        plain = reported(await answers(stack.client, Speculation(off=True), 0.8, max_new_tokens=120))
        speculation = Speculation("eagle3", num_draft_tokens=4)
        stack.verify_hold.after(20)  # of five tokens at most: no answer is over
        waiting = asyncio.ensure_future(answers(stack.client, speculation, 0.8, max_new_tokens=120))
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert reported(lost) == plain
        assert sum(one.speculation.num_failovers for one in lost) > 0
        tokens = [token.source for one in lost for token in one.tokens if token.source]
        assert "eagle3" in tokens


async def test_fused_chooses_eagle3_among_attached_sources_and_gives_the_plain_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(step=1000)  # a clock by which every draft takes equally long, on a loaded machine too
    monkeypatch.setattr(fused, "FusedDrafter", partial(fused.FusedDrafter, clock_ns=lambda: next(ticks)))
    verify = save_all(tmp_path, "fused", "eagle3", "ngram")
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        chosen: Counter[str | None] = Counter()
        for temperature in (0.0, 0.8):
            plain = reported(await answers(client, Speculation(off=True), temperature))
            for num_draft_tokens in (None, 4):
                drafted = await answers(client, Speculation("fused", num_draft_tokens=num_draft_tokens), temperature)
                assert reported(drafted) == plain, (temperature, num_draft_tokens)
                chosen.update(token.source for one in drafted for token in one.tokens if token.source)
        assert chosen["eagle3"] and set(chosen) <= {"eagle3", "ngram"}
        typical = Speculation("fused", num_draft_tokens=4, mode=VerificationMode.TYPICAL)
        steered = await answers(client, typical, 0.8)
        assert {token.source for one in steered for token in one.tokens if token.source} == {"eagle3"}
        assert reported(await answers(client, typical, 0.8)) == reported(steered), "there the first one always drafts"
        await until_all_pages_are_free(client)


async def test_constraints_apply_to_eagle3_drafts(tmp_path: Path) -> None:
    async with services(tmp_path, {"drafters": ("model",)}, save_all(tmp_path)) as client:
        fields = {"temperature": 0.8, "seed": 4, "max_new_tokens": 40, "constraint": {"regex": "[a-f ]{20}"}}
        plain = await client.complete("x", **fields, off=True)
        drafted = await client.complete("x", **fields, drafter="eagle3")
        assert drafted.output_ids == plain.output_ids
        assert drafted.speculation.num_draft_tokens > 0


async def test_eagle3_settings_are_rejected_by_name(tmp_path: Path) -> None:
    async with services(tmp_path, {"drafters": ("model",)}, save_all(tmp_path)) as client:
        with pytest.raises(InvalidArgumentError, match=r"speculation.drafter.settings.max_depth"):
            await client.complete("x", speculation=Speculation("eagle3", {"max_depth": "65"}))


async def test_a_layer_of_another_target_stops_the_start_by_name(tmp_path: Path) -> None:
    options = save_all(tmp_path)
    save_layer(tmp_path / "eagle3", tiny_layer(tiny_shape(vocab_size=VOCAB_SIZE, state_layers=(0, 1, 1))))
    with pytest.raises(FailedPreconditionError, match=r"--eagle3 = .*target_hidden_size: 64: must be 32, the target's"):
        async with services(tmp_path, {"drafters": ("model",)}, options):
            pass
