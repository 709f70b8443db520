"""Gemma-4 assistants attached to the verify worker, over real services: the plain tokens in fewer forwards."""

from pathlib import Path
from typing import Any

import pytest

from betoken.client import Speculation, VerificationMode
from betoken.common.errors import FailedPreconditionError
from tests.drafters.gemma4_assistant.tiny import config_of, save_assistant, save_target
from tests.e2e.attached import PROMPTS, answers, reported
from tests.e2e.in_process import VOCAB_SIZE, save_pair, services, until_all_pages_are_free
from tests.router.harness import byte_tokenizer_json

NAME = "gemma4_assistant"
OFF = Speculation(off=True)
DRAFT = {"drafters": ("ngram",)}


def save_all(folder: Path, num_centroids: int = 0) -> dict[str, Any]:
    """A tiny target and a random assistant for it; the options of a verify worker that has it attached."""
    save_target(folder / "target", vocab_size=VOCAB_SIZE, spread=0.1)
    (folder / "target" / "tokenizer.json").write_text(byte_tokenizer_json())
    config = config_of(vocab_size=VOCAB_SIZE, num_centroids=num_centroids)
    save_assistant(folder / "assistant", config, spread=0.1)
    return {"attached_drafters": ("ngram", NAME), NAME: str(folder / "assistant")}


@pytest.mark.parametrize(
    ("num_centroids", "dtype", "temperatures"), [(0, "float32", (0.0, 0.8)), (34, "bfloat16", (0.8,))]
)
async def test_drafts_of_a_gemma4_assistant_give_the_plain_tokens(
    tmp_path: Path, num_centroids: int, dtype: str, temperatures: tuple[float, ...]
) -> None:
    """With 8 pages of four streams some are preempted, and their pages change."""
    verify = save_all(tmp_path, num_centroids) | {"num_pages": 8, "max_context": 100, "dtype": dtype}
    async with services(tmp_path, DRAFT, verify) as client:
        assert NAME in (await client.model_info()).drafters
        num_accepted = 0
        for temperature in temperatures:
            plain = reported(await answers(client, OFF, temperature, PROMPTS[:4], max_new_tokens=28))
            for num_prompts, num_draft_tokens in ((1, 4), (4, None)):
                speculation = Speculation(NAME, num_draft_tokens=num_draft_tokens)
                drafted = await answers(client, speculation, temperature, PROMPTS[:num_prompts], max_new_tokens=28)
                assert reported(drafted) == plain[:num_prompts], (temperature, num_draft_tokens)
                assert sum(one.speculation.num_failed_drafts for one in drafted) == 0
                tokens = [token for one in drafted for token in one.tokens if token.source]
                assert {token.source for token in tokens} <= {NAME}
                num_accepted += len(tokens)
        assert num_accepted > 0
        assert sum(worker.preemptions for worker in (await client.model_info()).verify_workers) > 0
        await until_all_pages_are_free(client)


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
