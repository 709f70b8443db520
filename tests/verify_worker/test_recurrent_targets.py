"""Targets with recurrent states: random drafts, trees, chunks and too few pages give `generate()`'s tokens."""

import pytest
from transformers import AutoModelForCausalLM

from tests.engine.tiny import save_tiny
from tests.engine.tiny_hybrids import by_width
from tests.products import slow
from tests.verify_worker.as_generate import assert_speculation_gives_the_tokens_of_generate

FAMILIES = (
    *("lfm2", "lfm2_moe", "lfm3"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "mamba2", "zamba2"),
    *("jamba", "mamba", "falcon_mamba", "zamba", "minimax", "recurrent_gemma"),
)


OTHERS = ("qwen3_5", "olmo_hybrid", "falcon_h1", "nemotron_h")
"""Families with the recurrence of another one; `test_runner` tests their rows in the default run."""


@pytest.mark.parametrize("family", [*by_width(family for family in FAMILIES if family not in OTHERS), *slow(*OTHERS)])
def test_any_speculation_with_a_recurrent_target_gives_the_tokens_of_generate(tmp_path, family: str) -> None:
    directory = save_tiny(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    has_cache = family != "zamba2"  # whose step after a cache has no least time step, unlike its forward
    assert_speculation_gives_the_tokens_of_generate(directory, model, has_cache=has_cache)
