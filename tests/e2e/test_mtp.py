"""MTP layers of the target's checkpoint, attached to the verify worker, over real services: the plain tokens."""

import asyncio
from pathlib import Path

import pytest

from betoken.client import Speculation
from tests.drafters.mtp.tiny import add_layer, save_target
from tests.e2e.attached import PROMPTS, answers, reported
from tests.e2e.in_process import VOCAB_SIZE, running, save_pair, services, until_all_pages_are_free
from tests.router.harness import byte_tokenizer_json


def save_mtp_pair(folder: Path) -> None:
    save_pair(folder, "qwen3_5")
    add_layer(folder / "target", spread=0.4)


@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 24), ("bfloat16", 256)])
async def test_a_built_in_mtp_layer_gives_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    """With 24 pages sequences are preempted, and the layer receives their states again."""
    save_mtp_pair(tmp_path)
    verify = {"dtype": dtype, "num_pages": num_pages, "max_context": 200}
    async with services(tmp_path, {"drafters": ("model",)}, verify) as client:
        assert [worker.drafters for worker in (await client.model_info()).verify_workers] == [("mtp",)]
        sources = set()
        for temperature in (0.0, 0.8):
            for prompts in (PROMPTS[:1], PROMPTS):
                plain = reported(await answers(client, Speculation(off=True), temperature, prompts, max_new_tokens=28))
                for num_draft_tokens, branches in ((4, 1), (None, 4)):
                    speculation = Speculation("mtp", {"max_branches": branches}, num_draft_tokens)
                    drafted = await answers(client, speculation, temperature, prompts, max_new_tokens=28)
                    assert reported(drafted) == plain, (temperature, num_draft_tokens, branches)
                    assert sum(one.speculation.num_failed_drafts for one in drafted) == 0
                    sources |= {token.source for one in drafted for token in one.tokens if token.source}
        assert sources == {"mtp"}
        preemptions = sum(worker.preemptions for worker in (await client.model_info()).verify_workers)
        assert (preemptions > 0) == (num_pages == 24)
        await until_all_pages_are_free(client)


async def test_a_worker_without_the_mtp_drafter_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    save_mtp_pair(tmp_path)
    others = [{"attached_drafters": "none"}]
    async with running(
        tmp_path, {"drafters": ("model",)}, {"attached_drafters": "fused,mtp,ngram"}, other_verify_options=others
    ) as stack:
        plain = reported(await answers(stack.client, Speculation(off=True), 0.8, max_new_tokens=60))
        fused = await answers(stack.client, Speculation("fused", num_draft_tokens=4), 0.8, max_new_tokens=60)
        assert reported(fused) == plain
        stack.verify_hold.after(10)  # of five tokens at most: no answer is over
        waiting = asyncio.ensure_future(
            answers(stack.client, Speculation("mtp", num_draft_tokens=4), 0.8, max_new_tokens=60)
        )
        await stack.verify_hold.reached()
        await stack.lose_verify()
        lost = await waiting
        assert reported(lost) == plain
        assert sum(one.speculation.num_failovers for one in lost) > 0


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2_flash"])
async def test_an_mtp_layer_of_a_mixture_gives_the_plain_tokens(tmp_path: Path, name: str) -> None:
    """One with latent attention and experts, one with a window."""
    save_target(tmp_path / "target", name, vocab_size=VOCAB_SIZE)
    (tmp_path / "target" / "tokenizer.json").write_text(byte_tokenizer_json())
    async with services(tmp_path, {"drafters": ("ngram",)}) as client:
        sources = set()
        for temperature in (0.0, 0.8):
            plain = reported(await answers(client, Speculation(off=True), temperature, max_new_tokens=24))
            drafted = await answers(client, Speculation("mtp", num_draft_tokens=4), temperature, max_new_tokens=24)
            assert reported(drafted) == plain
            sources |= {token.source for one in drafted for token in one.tokens if token.source}
        assert sources == {"mtp"}
