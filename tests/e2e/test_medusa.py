"""Medusa attached to the verify worker, over real services: the plain tokens whatever heads, tree and length."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from betoken.client import AsyncClient, Completion, InvalidArgumentError, Sampling, Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from tests.drafters.medusa.files import RandomHeads
from tests.drafters.medusa.fit import fit_heads
from tests.e2e.in_process import VOCAB_SIZE, running, save_pair, services, until_all_pages_are_free

PROMPTS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(8)]
TREES: list[tuple[dict[str, str], tuple[int | None, ...]]] = [
    ({"max_branches": "1"}, (None, 3)),
    ({}, (None, 1, 3, 64)),
    ({"max_branches": "3", "max_depth": "2"}, (3, 64)),
    ({"tree": "mc_sim_7b_63"}, (64, None, 1)),
    ({"tree": "[[0], [1], [0, 0], [0, 0, 1]]"}, (3, None)),
]
"""Settings, and numbers of draft tokens for each."""


async def answers(
    client: AsyncClient, speculation: Speculation, temperature: float, prompts: list[str], num_tokens: int = 24
) -> list[Completion]:
    """All prompts at once."""
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=num_tokens, ignore_eos=True, logprobs=2)
    waiting = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt in prompts]
    return await asyncio.gather(*waiting)


def reported(completions: list[Completion]) -> list[object]:
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in completions]


def options(folder: Path, **others: Any) -> dict[str, Any]:
    return {"attached_drafters": ("medusa",), "medusa": folder / "heads", "max_draft_tokens": 64} | others


@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 24), ("bfloat16", 256)])
async def test_medusa_gives_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    verify = options(tmp_path, dtype=dtype, num_pages=num_pages, max_context=200)
    num_accepted = 0
    async with services(tmp_path, {"drafters": ("model",), "max_draft_tokens": 64}, verify) as client:
        assert "medusa" in (await client.model_info()).drafters
        for temperature in (0.0, 0.8):
            for prompts in (PROMPTS[:1], PROMPTS):
                plain = reported(await answers(client, Speculation(off=True), temperature, prompts))
                is_widest = len(prompts) > 1 and dtype == "float32" and temperature > 0
                for settings, lengths in TREES[: 2 if len(prompts) == 1 else None]:
                    for num_draft_tokens in lengths if is_widest else lengths[:1]:
                        speculation = Speculation("medusa", settings, num_draft_tokens)
                        drafted = await answers(client, speculation, temperature, prompts)
                        assert reported(drafted) == plain, (temperature, settings, num_draft_tokens)
                        accepted = [token for one in drafted for token in one.tokens if token.source]
                        assert {token.source for token in accepted} <= {"medusa"}
                        most = num_draft_tokens or 64
                        for one in drafted:
                            assert one.speculation.num_draft_tokens <= most * max(1, one.speculation.num_drafts)
                        num_accepted += len(accepted)
        preemptions = sum(worker.preemptions for worker in (await client.model_info()).verify_workers)
        assert (preemptions > 0) == (num_pages == 24)
        await until_all_pages_are_free(client)
    assert num_accepted > 0


async def test_adapters_are_chosen_by_request_and_refused_by_name(tmp_path: Path) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    fit_heads(tmp_path / "target", tmp_path / "adapters" / "fitted")
    RandomHeads(32, VOCAB_SIZE).save(tmp_path / "adapters" / "random", "lorax")
    RandomHeads(32, VOCAB_SIZE).save(tmp_path / "adapters" / "foreign", "v1", base="vicuna")
    verify = options(tmp_path, adapter_dir=tmp_path / "adapters", max_adapters=1)
    async with services(tmp_path, {"drafters": ("model",), "max_draft_tokens": 64}, verify) as client:
        plain = reported(await answers(client, Speculation(off=True), 0.8, PROMPTS))
        for name in ("fitted", "random", "fitted"):
            drafted = await answers(client, Speculation("medusa", {"adapter": name}), 0.8, PROMPTS)
            assert reported(drafted) == plain
        for name, limit in (
            ("foreign", "base_model_name_or_path"),
            ("unknown", "must be one in the worker's --adapter-dir"),
            ("../heads", "must be 1 to 128 letters"),
        ):
            with pytest.raises(InvalidArgumentError, match=rf"drafter.settings.adapter.*{limit}") as refused:
                await client.complete("x", speculation=Speculation("medusa", {"adapter": name}))
            assert refused.value.field.endswith("drafter.settings.adapter")
        with pytest.raises(InvalidArgumentError, match=r"drafter.settings.tree"):
            await client.complete("x", speculation=Speculation("medusa", {"tree": "oak"}))
        with pytest.raises(InvalidArgumentError, match=r"drafter.settings"):
            await client.complete("x", speculation=Speculation("medusa", {"leaves": "1"}))
        await until_all_pages_are_free(client)


async def test_typical_takes_trees_repeats_and_goes_by_the_requests_bounds(tmp_path: Path) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    typical = VerificationMode.TYPICAL
    async with services(tmp_path, {"drafters": ("model",)}, options(tmp_path, max_draft_tokens=16)) as client:
        greedy = reported(await answers(client, Speculation(off=True), 0.0, PROMPTS))
        rates: dict[object, float] = {}
        for bounds in ((None, None), (1.0, 10.0), (0.0, 0.0)):
            for settings in ({"max_branches": "1"}, {}, {"tree": "mc_sim_7b_63"}):
                how = Speculation("medusa", settings, 16, mode=typical)
                how = replace(how, posterior_threshold=bounds[0], posterior_alpha=bounds[1])
                first = await answers(client, how, 0.8, PROMPTS)
                assert {one.mode for one in first} == {typical}
                if bounds == (None, None) or settings == {}:
                    assert reported(await answers(client, how, 0.0, PROMPTS)) == greedy, "at 0 it is the rule"
                    assert reported(await answers(client, how, 0.8, PROMPTS)) == reported(first)
                num_accepted = sum(one.speculation.num_accepted_tokens for one in first)
                rates[bounds, str(settings)] = num_accepted / sum(one.speculation.num_drafts for one in first)
        for settings in ("{}", "{'tree': 'mc_sim_7b_63'}", "{'max_branches': '1'}"):
            strict, usual, lax = (rates[bounds, settings] for bounds in ((1.0, 10.0), (None, None), (0.0, 0.0)))
            assert strict < usual < lax, (settings, rates)
        assert rates[(None, None), "{}"] > rates[(None, None), "{'max_branches': '1'}"], "trees bring more"
        assert rates[(0.0, 0.0), "{'max_branches': '1'}"] > 2.5, "all that can be is taken: a chain is three tokens"
        await until_all_pages_are_free(client)


async def test_typical_bounds_outside_their_range_or_mode_are_rejected(tmp_path: Path) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    typical = VerificationMode.TYPICAL
    async with services(tmp_path, {"drafters": ("model",)}, options(tmp_path)) as client:
        for name, value, mode, limit in (
            ("posterior_threshold", 1.5, typical, "must be 0 to 1"),
            ("posterior_threshold", float("nan"), typical, "must be 0 to 1"),
            ("posterior_alpha", -0.5, typical, "must be 0 to 10"),
            ("posterior_alpha", 0.3, None, "must be absent but in the mode TYPICAL"),
            ("posterior_threshold", 0.5, VerificationMode.REJECTION, "must be absent but in the mode TYPICAL"),
        ):
            with pytest.raises(InvalidArgumentError, match=f"speculation.{name} = .*: {limit}"):
                await client.complete("x", speculation=replace(Speculation(mode=mode), **{name: value}))


async def test_a_worker_without_the_heads_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    verify = options(tmp_path, max_draft_tokens=16)
    async with running(tmp_path, {"drafters": ("model",)}, verify, other_verify_options=[{}]) as stack:
        plain = reported(await answers(stack.client, Speculation(off=True), 0.8, PROMPTS, num_tokens=120))
        speculation = Speculation("medusa", num_draft_tokens=4)
        stack.verify_hold.after(20)  # of five tokens at most: no answer is over
        waiting = asyncio.ensure_future(answers(stack.client, speculation, 0.8, PROMPTS, num_tokens=120))
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert reported(lost) == plain
        assert sum(one.speculation.num_failovers for one in lost) > 0
        assert "medusa" in {token.source for one in lost for token in one.tokens}


async def test_constraints_and_penalties_apply_to_medusa_drafts(tmp_path: Path) -> None:
    save_pair(tmp_path)
    fit_heads(tmp_path / "target", tmp_path / "heads")
    async with services(tmp_path, {"drafters": ("model",)}, options(tmp_path, max_draft_tokens=16)) as client:
        for rules in ({"constraint": {"regex": "[a-f ]{20}"}}, {"presence_penalty": 1.5, "logit_bias": {70: 4.0}}):
            fields = {"temperature": 0.8, "seed": 4, "max_new_tokens": 40} | rules
            plain = await client.complete("x", **fields, off=True)
            drafted = await client.complete("x", **fields, drafter="medusa", num_draft_tokens=8)
            assert drafted.output_ids == plain.output_ids
            assert drafted.speculation.num_draft_tokens > 0


async def test_heads_of_another_target_stop_the_start_by_name(tmp_path: Path) -> None:
    save_pair(tmp_path)
    RandomHeads(48, VOCAB_SIZE).save(tmp_path / "heads", "v1")
    with pytest.raises(FailedPreconditionError, match=r"--medusa = .*0.0.linear.bias: \[48\]: must be \[32\]"):
        async with services(tmp_path, {"drafters": ("model",)}, options(tmp_path)):
            pass
    with pytest.raises(FailedPreconditionError, match=r"--medusa or --adapter-dir: must be given"):
        async with services(tmp_path, {"drafters": ("model",)}, {"attached_drafters": ("medusa",)}):
            pass
