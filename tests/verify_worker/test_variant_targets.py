"""Attention of a family's own kind: random drafts, trees, chunks and too few pages give `generate()`'s tokens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.config import EngineConfig
from tests.engine.tiny import CONFIGS, POPULAR, VARIANTS, save_tiny
from tests.verify_worker.as_generate import assert_speculation_gives_the_tokens_of_generate

FAMILIES = (*VARIANTS, *POPULAR, *(family for family in CONFIGS if family != "lfm2"))
EAGER = ("laguna",)
"""Families whose compiled rows depend on each other, which a load finds: they run eagerly."""
_USUAL = ("bloom", "codegen", "gpt_neo", "hunyuan_v1_moe", "llama4_text", "phimoe")
"""Families of the default run: families with replaced modules."""


@pytest.mark.parametrize(
    "family", [family if family in _USUAL else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_any_speculation_with_a_variant_target_gives_the_tokens_of_generate(tmp_path, family: str) -> None:
    directory = save_tiny(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager").eval()
    assert_speculation_gives_the_tokens_of_generate(directory, model)


@pytest.mark.slow
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_variant_targets_equal_the_models_own_in_any_batch(
    tmp_path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str, has_kernels: bool
) -> None:
    """A load checks it too, over few tokens; these pass windows, spans and pages."""
    if not has_kernels:
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    directory = save_tiny(tmp_path, family)
    runner = load_runner(EngineConfig(directory, dtype=dtype, num_pages=64, compile="off", self_check=False))
    sequences = [[(7 * n + 11 * at) % 101 for at in range(length)] for n, length in enumerate((37, 5, 1, 60))]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    is_mixture = any(name.endswith("experts") for name, _ in model.named_modules())
    strays, sizes = [], []
    for ids, ours in zip(sequences, forward_together(runner, sequences), strict=True):
        theirs = model(torch.tensor([ids])).logits[0].detach().float()
        difference, size = (ours - theirs).abs().mean(dim=-1), theirs.abs().mean(dim=-1)
        if is_mixture:
            strays.append(difference)
            sizes.append(size)
        else:
            assert difference.mean() < size.mean() * 5e-2
        if dtype == "float32":
            torch.testing.assert_close(ours, theirs, rtol=0, atol=theirs.abs().mean().item() * 1e-3)
        for chunk_rows in (1, 5, 8):
            assert torch.equal(forward_in_chunks(runner, ids, chunk_rows), ours)
    if is_mixture:  # most rows: one rounding may send a token to another expert, and what follows reads that token
        assert torch.cat(strays).quantile(0.6) < torch.cat(sizes).mean() * 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EAGER])
def test_variant_targets_compile(tmp_path, family: str) -> None:
    runner = load_runner(EngineConfig(save_tiny(tmp_path, family), dtype="float32", num_pages=64, compile="on"))
    assert runner.is_compiled
