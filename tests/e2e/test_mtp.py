"""MTP layers of the target's checkpoint, attached to the verify worker, over real services: the plain tokens."""

import asyncio
from pathlib import Path

import pytest

from betoken.client import Speculation, VerificationMode
from betoken.common.gguf import read_header, read_tokenizer
from tests.drafters.mtp.gguf_files import write_both
from tests.drafters.mtp.tiny import save_nemotron, save_target
from tests.e2e.attached import PROMPTS, answers, assert_distributed_as_plain, reported
from tests.e2e.in_process import VOCAB_SIZE, running, services, until_all_pages_are_free
from tests.e2e.setups import save_mtp
from tests.router.harness import byte_tokenizer_json


@pytest.mark.parametrize(("dtype", "num_pages"), [("float32", 24), ("bfloat16", 256)])
async def test_a_built_in_mtp_layer_gives_the_plain_tokens(tmp_path: Path, dtype: str, num_pages: int) -> None:
    """With 24 pages sequences are preempted, and the layer receives their states again."""
    save_mtp(tmp_path)
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
    save_mtp(tmp_path)
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


async def test_rejection_with_the_mtp_layers_probabilities_keeps_the_targets_distribution(tmp_path: Path) -> None:
    save_mtp(tmp_path)
    async with services(tmp_path, {"drafters": ("ngram",)}) as client:
        rejection = Speculation("mtp", num_draft_tokens=3, mode=VerificationMode.REJECTION)
        await assert_distributed_as_plain(client, rejection, 360)


@pytest.mark.parametrize("name", ["deepseek_v3", "mimo_v2_flash", "nemotron_h"])
async def test_an_mtp_layer_of_a_mixture_gives_the_plain_tokens(tmp_path: Path, name: str) -> None:
    """One with latent attention and experts, one with a window, a hybrid with two blocks."""
    if name == "nemotron_h":
        save_nemotron(tmp_path / "target", vocab_size=VOCAB_SIZE)
    else:
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


async def test_an_mtp_layer_of_a_gguf_file_gives_the_plain_tokens(tmp_path: Path) -> None:
    path = Path(write_both(tmp_path, "qwen35", "Q8_0")[0])
    (path.parent / "tokenizer.json").write_text(read_tokenizer(read_header(path)).text)
    async with services(tmp_path, {"drafters": ("ngram",)}) as client:
        assert [worker.drafters for worker in (await client.model_info()).verify_workers] == [("mtp",)]
        plain = await answers(client, Speculation(off=True), 0.8, PROMPTS[:4], max_new_tokens=24)
        drafted = await answers(client, Speculation("mtp", num_draft_tokens=4), 0.8, PROMPTS[:4], max_new_tokens=24)
        assert reported(drafted) == reported(plain)
        assert sum(one.speculation.num_accepted_tokens for one in drafted) > 0
