"""The recipe of PARD drafters: rows see what a draft's rows see, and the checkpoint drafts in parallel."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.config import EngineConfig
from betoken.engine.weights.loading import load_model
from betoken.training import measure, pard
from betoken.training.parallel_rows import ParallelRows, parallel_logits
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher

MASK, LENGTH = 511, 4


def load(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


@torch.no_grad()
def test_each_row_has_the_logits_of_the_draft_that_it_belongs_to(tiny_pair: Path) -> None:
    model, ids = load(tiny_pair / "draft"), torch.randint(500, (1, 9), generator=torch.Generator().manual_seed(1))
    rows = ParallelRows.drawn(9, LENGTH, 0.7, 0.3, torch.Generator().manual_seed(2))
    assert {int(depth) for depth in rows.depths} == set(range(LENGTH)) and len(rows.depths) < 9 * LENGTH - 6
    found = parallel_logits(model, ids, rows, MASK)[0]
    for depth, position, logits in zip(rows.depths.tolist(), rows.positions.tolist(), found, strict=True):
        drafted = torch.cat([ids[:, : position - depth + 1], torch.full((1, depth), MASK)], 1)
        torch.testing.assert_close(logits, model(input_ids=drafted).logits[0, -1], atol=1e-4, rtol=1e-4)


def test_rows_are_dropped_with_the_rows_that_they_need() -> None:
    rows = ParallelRows.drawn(200, 6, 0.7, 0.2, torch.Generator().manual_seed(3))
    kept = set(zip(rows.depths.tolist(), rows.positions.tolist(), strict=True))
    assert all(depth == 0 or (depth - 1, position - 1) in kept for depth, position in kept)
    counts = torch.bincount(rows.depths).tolist()
    assert counts == [200, *(round(200 * max(0.7**depth, 0.2)) for depth in range(1, 6))]


@torch.no_grad()
def test_rounds_count_the_tokens_that_one_forward_predicts(tiny_pair: Path) -> None:
    model = load(tiny_pair / "draft")
    ids = list(range(40, 48))
    for _ in range(2):  # two rounds of which all tokens are right
        masked = torch.tensor([[*ids, *[MASK] * (LENGTH - 1)]])
        ids += model(input_ids=masked).logits[0, -LENGTH:].argmax(-1).tolist()
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    rounds = pard.parallel_rounds(model, MASK, LENGTH, [Sample(tuple(ids), 7)])
    assert rounds.depths[LENGTH] == 2 and rounds.block_efficiency == LENGTH + 1


def train(pair: Path, out: Path, *further: str) -> None:
    options = ["--target", str(pair / "target"), "--out", str(out), "--run-dir", f"{out}_run", "--device", "cpu"]
    options += ["--texts", str(pair / "texts.jsonl"), "--max-length", "64", "--num-held-out", "4", "--batch-rows", "4"]
    pard.main([*options, "--threads", "1", "--tokens", "400", "--length", str(LENGTH), *further])


def test_the_recipe_writes_a_checkpoint_with_a_mask_token(tiny_pair: Path, tmp_path: Path) -> None:
    train(tiny_pair, tmp_path / "out", "--num-layers", "2", "--mask-token", str(MASK))
    _, info = load_model(EngineConfig(str(tmp_path / "out")), lambda stage, fraction: None)
    assert info.mask_token_id == MASK
    assert "| after |" in (tmp_path / "out" / "README.md").read_text()
    teacher = Teacher.load(str(tiny_pair / "target"), "float32", "cpu")
    found = measure.measure(teacher, tmp_path / "out", [Sample(tuple(range(30)), 9)], 1)
    assert list(found) == ["chain of 8", "chain of 16", "chain of 32"]
    assert all(rounds.num_tokens == 20 for rounds in found.values())


@pytest.mark.parametrize("model_type", ["lfm2", "mamba", "qwen3_5_text", "bloom"])
def test_a_model_without_maskable_attention_is_refused_by_name(model_type: str) -> None:
    pard.check_layers("llama")
    with pytest.raises(ValueError, match=f"draft: layers of {model_type} cannot hold several drafts"):
        pard.check_layers(model_type)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        (["--length", "1"], "length 1: must be 2 to 64"),
        (["--keep-share", "0"], "keep_share 0.0: must be above 0"),
        (["--mask-token", "512"], "mask_token 512: must be at least 0 and below 512"),
        ([], "mask_token: the tokenizer uses all 512 ids"),
        (["--draft", "x"], "draft, num_layers: exactly one"),
    ],
)
def test_a_bad_option_of_the_recipe_is_reported_by_name(
    tiny_pair: Path, tmp_path: Path, options: list[str], reported: str
) -> None:
    with pytest.raises(SystemExit, match=reported):
        train(tiny_pair, tmp_path / "out", "--num-layers", "1", *options)
