import argparse
import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from foretoken.training import pair
from foretoken.training.corpus import Corpus, Document, stdlib_root
from foretoken.training.models import Shape


def small_corpus() -> Corpus:
    documents = [Document(path.name, path.read_text()) for path in sorted((stdlib_root() / "email").glob("*.py"))]
    held_out = tuple(Document(document.path, document.text[:4000]) for document in documents[-3:])
    return Corpus(tuple(documents[:-3]), held_out)


def test_the_whole_recipe_runs_and_a_second_call_resumes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "load_corpus", small_corpus)
    monkeypatch.setattr(pair, "TARGET", Shape(32, 2, 2, 1, 48))
    monkeypatch.setattr(pair, "DRAFT", Shape(16, 1, 2, 1, 24))
    out, run_dir = tmp_path / "models", tmp_path / "run"
    budget = ["--target-tokens", "8192", "--draft-tokens", "4096", "--batch-blocks", "2"]
    arguments = ["pair", "--out", str(out), "--run-dir", str(run_dir), "--device", "cpu", "--no-compile", *budget]
    monkeypatch.setattr(sys, "argv", arguments)

    pair.main()
    weights = (out / "target" / "model.safetensors").read_bytes()
    card = (out / "README.md").read_text()
    assert "held-out loss" in card and "[512, 768)" in card and "--target-tokens 8192" in card
    assert json.loads((run_dir / "corpus.json").read_text())["held_out"]["files"] == 3
    assert (out / "loss.png").stat().st_size > 1000
    assert AutoModelForCausalLM.from_pretrained(out / "draft").config.vocab_size == 4096

    pair.main()
    assert (out / "target" / "model.safetensors").read_bytes() == weights
    assert (out / "README.md").read_text() == card


@pytest.mark.parametrize("change", [["--seed", "7"], ["--target-tokens", "16384"], ["--draft-minutes", "1"]], ids=str)
def test_a_run_folder_of_another_recipe_is_refused(tmp_path: Path, change: list[str]) -> None:
    """It would go on with the other's weights, and the card would describe neither."""

    def options(*further: str) -> argparse.Namespace:
        return pair.parse_arguments(["--out", str(tmp_path), "--run-dir", str(tmp_path / "run"), *further])

    pair.check_recipe(options())
    pair.check_recipe(options("--threads", "1"))
    with pytest.raises(ValueError, match=change[0].removeprefix("--").replace("-", "_")):
        pair.check_recipe(options(*change))


def test_defaults_are_a_token_budget_of_about_ten_epochs() -> None:
    options = pair.parse_arguments(["--out", "models"])
    assert options.minutes is None and options.target_tokens >= 90_000_000
