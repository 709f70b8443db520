import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from betoken.training import pair
from betoken.training.corpus import Corpus, Document, stdlib_root
from betoken.training.models import Shape


def small_corpus() -> Corpus:
    documents = [Document(path.name, path.read_text()) for path in sorted((stdlib_root() / "email").glob("*.py"))]
    held_out = tuple(Document(document.path, document.text[:2500]) for document in documents[-3:])
    return Corpus(tuple(documents[:-3]), held_out)


class Recipe:
    """The whole recipe on a small corpus and small shapes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pair, "load_corpus", small_corpus)
        monkeypatch.setattr(pair, "TARGET", Shape(32, 2, 2, 1, 48))
        monkeypatch.setattr(pair, "DRAFT", Shape(16, 1, 2, 1, 24))
        self._folder, self._monkeypatch = folder, monkeypatch

    def __call__(self, name: str, *further: str) -> Path:
        """Run it into folder `name` and return that."""
        out, run_dir = self._folder / name, self._folder / f"run_{name}"
        budget = ["--target-tokens", "8192", "--draft-tokens", "4096", "--batch-blocks", "2"]
        options = ["--out", str(out), "--run-dir", str(run_dir), "--device", "cpu", "--no-compile", *budget, *further]
        self._monkeypatch.setattr(sys, "argv", ["pair", *options])
        pair.main()
        return out


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    return Recipe(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Recipe, Path]]:
    """A recipe that has been run into the folder `models`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recipe = Recipe(tmp_path_factory.mktemp("trained"), monkeypatch)
        yield recipe, recipe("models")


@pytest.fixture
def first(trained: tuple[Recipe, Path], tmp_path: Path) -> Path:
    """A copy of the trained pair."""
    return shutil.copytree(trained[1], tmp_path / "first")


def test_the_whole_recipe_runs_and_a_second_call_resumes_it(trained: tuple[Recipe, Path]) -> None:
    recipe, out = trained
    run_dir = out.with_name("run_models")
    weights = (out / "target" / "model.safetensors").read_bytes()
    card = (out / "README.md").read_text()
    assert "held-out loss" in card and "[512, 768)" in card and "--target-tokens 8192" in card
    assert json.loads((run_dir / "corpus.json").read_text())["held_out"]["files"] == 3
    assert (out / "loss.png").stat().st_size > 1000
    assert AutoModelForCausalLM.from_pretrained(out / "draft").config.vocab_size == 4096

    assert recipe("models") == out
    assert (out / "target" / "model.safetensors").read_bytes() == weights
    assert (out / "README.md").read_text() == card


def test_a_pair_is_trained_further_from_its_weights_alone(
    recipe: Recipe, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "CONTINUED_LR", 0.0)
    unchanged = recipe("unchanged", "--start-from", str(first), "--seed", "1")
    for name in ("target", "draft"):
        weights = (first / name / "model.safetensors").read_bytes()
        assert (unchanged / name / "model.safetensors").read_bytes() == weights, "it begins with the pair's weights"


def test_the_card_of_a_pair_that_was_trained_further_counts_every_run(recipe: Recipe, first: Path) -> None:
    second = recipe("second", "--start-from", str(first), "--seed", "1")
    runs = json.loads((second / "training_runs.json").read_text())
    assert [run["target_tokens"] for run in runs] == [8192, 8192]
    assert runs[:1] == json.loads((first / "training_runs.json").read_text())
    assert (second / "target" / "model.safetensors").read_bytes() != (
        first / "target" / "model.safetensors"
    ).read_bytes()
    card = (second / "README.md").read_text()
    assert "| 0.02M |" in card and card.count("python -m betoken.training.pair") == 2


def test_the_draft_alone_can_be_trained_further(recipe: Recipe, first: Path) -> None:
    with pytest.raises(SystemExit, match="target_tokens 0.* start_from"):
        recipe("second", "--target-tokens", "0")
    second = recipe("second", "--start-from", str(first), "--seed", "1", "--target-tokens", "0")
    before, after = (
        {name: (folder / name / "model.safetensors").read_bytes() for name in ("target", "draft")}
        for folder in (first, second)
    )
    assert after["target"] == before["target"] and after["draft"] != before["draft"]
    assert json.loads((second / "training_runs.json").read_text())[1]["target_tokens"] == 0


@pytest.mark.parametrize("wrong", ["tokenizer", "training_runs"])
def test_a_pair_of_another_tokenizer_or_history_is_refused(recipe: Recipe, first: Path, wrong: str) -> None:
    if wrong == "training_runs":
        (first / "training_runs.json").unlink()
    else:
        file = first / "target" / "tokenizer.json"
        state = json.loads(file.read_text())
        state["model"]["merges"].pop()
        file.write_text(json.dumps(state))
    with pytest.raises(SystemExit, match=f"start_from .*first.*{wrong}"):
        recipe("second", "--start-from", str(first), "--seed", "1")


@pytest.mark.parametrize(
    "change",
    [["--seed", "7"], ["--start-from", "models"], ["--target-tokens", "16384"], ["--draft-minutes", "1"]],
    ids=str,
)
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


def test_a_pair_is_not_written_over_the_one_it_starts_from(recipe: Recipe, first: Path) -> None:
    with pytest.raises(SystemExit, match="out .*first"):
        recipe("first", "--start-from", str(first))


@pytest.mark.parametrize(
    "name", ["target-tokens", "draft-tokens", "minutes", "draft-minutes", "batch-blocks", "threads"]
)
def test_a_budget_of_nothing_is_refused_before_anything_is_made(recipe: Recipe, name: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{name.replace('-', '_')} -1.*: must be above 0"):
        recipe("first", f"--{name}", "-1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [("seed", "-1"), ("device", "nonsense")])
def test_options_that_would_fail_later_are_rejected_at_once(
    recipe: Recipe, option: str, value: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"{option} {value}: "):
        recipe("first", f"--{option}", value)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_cut_off_by_an_interruption_is_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair, "load_corpus", small_corpus)
    with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
        interrupted.setattr(pair.os, "replace", cut_off)
        pair.prepare_data(tmp_path)
    tokenizer, streams = pair.prepare_data(tmp_path)
    assert tokenizer.get_vocab_size() == 4096 and set(streams) == {"training", "held_out"}
    assert (tmp_path / "tokenizer.json").exists()


def test_an_interruption_is_reported_in_a_line(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(self: pair.PairRecipe) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pair.PairRecipe, "train_target", interrupt)
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
        recipe("first")
    assert ended.value.code == 130 and "the same command goes on" in caplog.text
