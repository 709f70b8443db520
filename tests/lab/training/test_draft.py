from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.training import distill_table, draft
from betoken.training.distill import DIVERGENCES


def train(pair: Path, out: Path, *further: str) -> Path:
    options = [
        "--target",
        str(pair / "target"),
        "--out",
        str(out),
        "--run-dir",
        f"{out}_run",
        "--device",
        "cpu",
        "--compile",
        "off",
    ]
    options += ["--texts", str(pair / "texts.jsonl"), "--prompts", str(pair / "prompts.jsonl"), "--num-prompts", "16"]
    options += ["--held-out-prompts", str(pair / "prompts.jsonl"), "--num-held-out", "4", "--max-length", "64"]
    options += ["--batch-rows", "4", "--threads", "1", "--max-new-tokens", "16", "--renew-every", "2"]
    draft.main([*options, *further])
    return out


@pytest.mark.parametrize("source", draft.SOURCES)
def test_a_draft_learns_from_every_source(tiny_pair: Path, tmp_path: Path, source: str) -> None:
    out = train(tiny_pair, tmp_path / "out", "--draft", str(tiny_pair / "draft"), "--source", source, "--tokens", "400")
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 16
    assert "| after |" in (out / "README.md").read_text()


def test_a_draft_may_begin_as_layers_of_the_target(tiny_pair: Path, tmp_path: Path) -> None:
    out = train(tiny_pair, tmp_path / "out", "--num-layers", "2", "--source", "text", "--tokens", "200")
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 2


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_are_zero_of_equals_and_as_defined(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    target, other = torch.randn(2, 3, 7, generator=generator)
    divergence = DIVERGENCES[name]
    torch.testing.assert_close(divergence(target, target), torch.zeros(3), atol=1e-6, rtol=0)
    p, q = target.double().softmax(-1), other.double().softmax(-1)
    expected = {
        "forward-kl": (p * (p / q).log()).sum(-1),
        "reverse-kl": (q * (q / p).log()).sum(-1),
        "jsd": ((p * (2 * p / (p + q)).log()).sum(-1) + (q * (2 * q / (p + q)).log()).sum(-1)) / 2,
        "tv": 1 - torch.minimum(p, q).sum(-1),
    }[name]
    torch.testing.assert_close(divergence(target, other).double(), expected, atol=1e-5, rtol=1e-5)


def test_the_table_has_a_row_for_every_cell(tiny_pair: Path, tmp_path: Path) -> None:
    options = [
        "--target",
        str(tiny_pair / "target"),
        "--draft",
        str(tiny_pair / "draft"),
        "--out",
        str(tmp_path / "out"),
    ]
    options += ["--run-dir", str(tmp_path / "run"), "--device", "cpu", "--compile", "off", "--threads", "1"]
    options += ["--texts", str(tiny_pair / "texts.jsonl"), "--prompts", str(tiny_pair / "prompts.jsonl")]
    options += ["--num-prompts", "8", "--held-out-prompts", str(tiny_pair / "prompts.jsonl"), "--num-held-out", "3"]
    options += ["--max-length", "64", "--batch-rows", "2", "--max-new-tokens", "8", "--tokens", "20"]
    distill_table.main(options)
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.count("\n") == 2 + 1 + len(DIVERGENCES) * len(draft.SOURCES)
    distill_table.main(options)  # all cells are there
    assert (tmp_path / "out" / "table.md").read_text() == text
