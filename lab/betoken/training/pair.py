"""The one command that makes the pair: `python -m betoken.training.pair --out models`.

With `--start-from` it trains a finished pair further, on any machine: weights are all that it needs of earlier runs.

Each stage leaves its result in the run folder, so the same command resumes an interrupted run. The stages are corpus
and tokenizer, target, draft distilled from the target, evaluation and model card. A command that would make another
pair is refused there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from betoken.training.corpus import load_corpus
from betoken.training.distill import distillation_loss
from betoken.training.evaluation import agreement, loss_by_position
from betoken.training.loop import Progress
from betoken.training.model_card import CardFacts, Run, TrainedModel, card_text, describe_place, draw_losses
from betoken.training.models import DRAFT, TARGET, Shape, build_model, num_parameters, save_model
from betoken.training.schedule import Budget
from betoken.training.tokenizer import encode_stream, save_tokenizer, train_tokenizer
from betoken.training.train import LossFunction, TrainSettings, next_token_loss, train
from betoken.training.windows import Windows

log = logging.getLogger("betoken.training")

Stream = npt.NDArray[np.uint16]

RUNS_FILE = "training_runs.json"
BLOCK_TOKENS = 1024
MATRIX_LR = 0.02
OTHER_LR = 4e-3
CONTINUED_LR = 0.5  # of the peaks, for a pair that is trained further; tried: the whole lost 0.4 nats in 1.5M tokens
TARGET_LONG_FROM = 0.8
DRAFT_LONG_FROM = 0.5  # tried: after 20 % at 1024 its loss still rose by 0.5 nats from position 256 to 1024

_DECISIVE = ("start_from", "target_tokens", "draft_tokens", "minutes", "draft_minutes", "batch_blocks", "seed")
"""The options that decide what the pair becomes."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command."""
    parser = argparse.ArgumentParser(
        prog="betoken.training.pair", description="Train the embedded model pair.", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for target/, draft/, README.md and loss.png")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/pair"), help="folder for checkpoints and caches")
    parser.add_argument(
        "--start-from", type=Path, help="folder of a pair to train further (give another seed: the order of the text)"
    )
    parser.add_argument(
        "--target-tokens",
        type=int,
        default=90_000_000,
        help="token budget of the target; 0 with --start-from leaves it as it is and trains the draft alone",
    )
    parser.add_argument("--draft-tokens", type=int, default=90_000_000, help="token budget of the draft")
    parser.add_argument("--minutes", type=float, help="time budget of the target in minutes, instead of tokens")
    parser.add_argument("--draft-minutes", type=float, help="time budget of the draft in minutes, instead of tokens")
    parser.add_argument("--batch-blocks", type=int, default=4, help="blocks of 1024 tokens in a batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile")
    parser.add_argument("--note", default="", help="words about the machine for the model card")
    return parser.parse_args(arguments)


def check_recipe(options: argparse.Namespace) -> None:
    """Keep in the run folder what its results are made with, or compare that with what is there.

    Raises:
        ValueError: an option or the Python whose library is the corpus differs.
    """
    options.run_dir.mkdir(parents=True, exist_ok=True)
    path = options.run_dir / "recipe.json"
    recipe = {name: getattr(options, name) for name in _DECISIVE} | {"python": platform.python_version()}
    recipe["start_from"] = options.start_from and str(options.start_from.resolve())
    found = json.loads(path.read_text()) if path.exists() else recipe
    for name, value in recipe.items():
        if found.get(name) != value:
            raise ValueError(f"{options.run_dir} was made with {name} {found.get(name)!r}, this run has {value!r}")
    if not path.exists():
        _write_whole(path, json.dumps(recipe, indent=1))


def check_values(options: argparse.Namespace, keeps_target: bool) -> None:
    """Checks of faults that would show after minutes of work.

    Raises:
        ValueError: a number is out of range, or the device is missing.
    """
    names = ["minutes", "draft_minutes", "draft_tokens", *(() if keeps_target else ("target_tokens",))]
    for name in (*names, "batch_blocks", "threads"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"{name} {value}: must be above 0")
    if options.seed < 0:
        raise ValueError(f"seed {options.seed}: must be at least 0")
    try:
        torch.empty(0, device=options.device)
    except (AssertionError, RuntimeError) as error:  # the first where torch was built without it
        raise ValueError(f"device {options.device}: {error}") from error


def prepare_data(run_dir: Path) -> tuple[Tokenizer, dict[str, Stream]]:
    """The tokenizer and the token streams `training` and `held_out`, made once and then read from `run_dir`."""
    files = {name: run_dir / f"{name}.npy" for name in ("training", "held_out")}
    tokenizer_file = run_dir / "tokenizer.json"
    if not all(path.exists() for path in (*files.values(), tokenizer_file)):
        log.info("reading the standard library and training the tokenizer")
        corpus = load_corpus()
        tokenizer = train_tokenizer(document.text for document in corpus.training)
        described: dict[str, Any] = {"fingerprint": corpus.fingerprint()}
        for name, documents in (("training", corpus.training), ("held_out", corpus.held_out)):
            stream = encode_stream(tokenizer, (document.text for document in documents))
            np.save(files[name], stream)
            num_bytes = sum(len(document.text.encode()) for document in documents)
            described[name] = {"files": len(documents), "bytes": num_bytes, "tokens": len(stream)}
        (run_dir / "corpus.json").write_text(json.dumps(described, indent=1))
        _write_whole(tokenizer_file, tokenizer.to_str(pretty=True))  # the last: the others are there then
    return Tokenizer.from_file(str(tokenizer_file)), {name: np.load(path) for name, path in files.items()}


def _write_whole(path: Path, text: str) -> None:
    """In one rename, so that what is there was not cut off."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def earlier_runs(folder: Path, tokenizer: Tokenizer) -> list[Run]:
    """The earlier runs of the pair in `folder`.

    Raises:
        ValueError: it has another tokenizer, so its ids stand for other text, or no list of its runs.
    """
    path = folder / RUNS_FILE
    if not path.exists():
        raise ValueError(f"start_from {folder}: {RUNS_FILE} is missing")
    theirs = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    if json.loads(theirs.to_str())["model"] != json.loads(tokenizer.to_str())["model"]:
        raise ValueError(f"start_from {folder}: its tokenizer is not the one of this corpus")
    return [Run(**run) for run in json.loads(path.read_text())]


class PairRecipe:
    """The stages of one run, in the order in which they are called."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Raises:
        ValueError: the run folder belongs to another recipe, there is too little text, the pair to start from
            has another tokenizer, no list of its runs or the folder that this run writes to, no target is to be
            trained without an existing one, a number is out of range, or the device does not exist.
        """
        if options.start_from is not None and options.out.resolve() == options.start_from.resolve():
            raise ValueError(f"out {options.out}: the pair to start from is there and needed until the end")
        self._keeps_target = options.target_tokens == 0 and options.minutes is None
        if self._keeps_target and options.start_from is None:
            raise ValueError("target_tokens 0: without start_from no trained target exists")
        check_values(options, self._keeps_target)
        check_recipe(options)
        self._options = options
        self._tokenizer, self._streams = prepare_data(options.run_dir)
        self._earlier_runs = earlier_runs(options.start_from, self._tokenizer) if options.start_from else []
        self._windows = Windows(self._streams["training"], BLOCK_TOKENS, options.batch_blocks, options.seed)

    def train_target(self) -> tuple[Any, Progress]:
        """The target, trained on the text and saved."""
        model = self._initial("target", TARGET, self._options.seed)
        if self._keeps_target:
            self._save("target", model)
            return model, Progress()
        budget = self._budget(self._options.minutes, self._options.target_tokens)
        settings = self._settings(budget, TARGET_LONG_FROM)
        return model, self._train("target", model, next_token_loss, settings)

    def train_draft(self, target: Any) -> Progress:
        """The draft, distilled from `target` and saved."""
        model = self._initial("draft", DRAFT, self._options.seed + 1)
        budget = self._budget(self._options.draft_minutes, self._options.draft_tokens)
        settings = self._settings(budget, DRAFT_LONG_FROM)
        return self._train("draft", model, distillation_loss(target), settings)

    def write_card(self, target_progress: Progress, draft_progress: Progress) -> None:
        """Measure the saved weights on the held-out text; write README.md and loss.png."""
        options, held_out = self._options, self._streams["held_out"]
        models = {name: self._load(name) for name in ("target", "draft")}
        runs = [*self._earlier_runs, self._this_run(target_progress, draft_progress)]
        (options.out / RUNS_FILE).write_text(json.dumps([vars(run) for run in runs], indent=1) + "\n")
        facts = CardFacts(
            runs=runs,
            corpus=json.loads((options.run_dir / "corpus.json").read_text()),
            agreement=agreement(models["target"], models["draft"], held_out, BLOCK_TOKENS),
            continued_lr=CONTINUED_LR,
        )

        def described(name: str, shape: Shape, long_from: float) -> TrainedModel:
            model = models[name]
            tokens, minutes = (sum(getattr(run, f"{name}_{unit}") for run in runs) for unit in ("tokens", "minutes"))
            losses = loss_by_position(model, held_out, BLOCK_TOKENS)
            return TrainedModel(name, shape, num_parameters(model), tokens, minutes, losses, long_from)

        target = described("target", TARGET, TARGET_LONG_FROM)
        draft = described("draft", DRAFT, DRAFT_LONG_FROM)
        (options.out / "README.md").write_text(card_text(target, draft, facts))
        draw_losses(target_progress, draft_progress, options.out / "loss.png")

    def _settings(self, budget: Budget, long_from: float) -> TrainSettings:
        scale = 1.0 if self._options.start_from is None else CONTINUED_LR
        return TrainSettings(
            budget=budget,
            matrix_lr=scale * MATRIX_LR,
            other_lr=scale * OTHER_LR,
            long_from=long_from,
            compile=self._options.compile,
        )

    def _initial(self, name: str, shape: Shape, seed: int) -> Any:
        model = build_model(shape, seed)
        if self._options.start_from is not None:
            model.load_state_dict(AutoModelForCausalLM.from_pretrained(self._options.start_from / name).state_dict())
        return self._placed(model)

    def _this_run(self, target: Progress, draft: Progress) -> Run:
        return Run(
            command=shlex.join(["python", "-m", "betoken.training.pair", *sys.argv[1:]]),
            where=describe_place(self._options.device, self._options.threads, self._options.note),
            seed=self._options.seed,
            target_tokens=target.num_tokens,
            target_minutes=round(target.elapsed_s / 60, 1),
            draft_tokens=draft.num_tokens,
            draft_minutes=round(draft.elapsed_s / 60, 1),
        )

    def _train(self, name: str, model: Any, loss: LossFunction, settings: TrainSettings) -> Progress:
        log.info("training the %s, %.2fM parameters", name, num_parameters(model) / 1e6)
        checkpoint = self._options.run_dir / f"{name}.pt"
        progress = train(model, loss, self._windows, settings, checkpoint, self._held_out_loss)
        self._save(name, model)
        return progress

    def _save(self, name: str, model: Any) -> None:
        save_model(model, self._options.out / name)
        save_tokenizer(self._tokenizer, self._options.out / name, BLOCK_TOKENS)

    @staticmethod
    def _budget(minutes: float | None, tokens: int) -> Budget:
        return Budget(minutes=minutes) if minutes is not None else Budget(tokens=tokens)

    def _held_out_loss(self, model: Any) -> float:
        """A quick estimate during training: the first 256 positions of a few windows."""
        return float(loss_by_position(model, self._streams["held_out"], BLOCK_TOKENS, max_windows=24)[:256].mean())

    def _load(self, name: str) -> Any:
        return self._placed(AutoModelForCausalLM.from_pretrained(self._options.out / name))

    def _placed(self, model: Any) -> Any:
        if self._options.device == "cpu":
            model.set_attn_implementation("eager")  # tried: with short windows a tenth faster than fused attention
        return model.to(self._options.device)


def main() -> None:
    """Run every stage that is not done yet."""
    options = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        try:
            recipe = PairRecipe(options)
        except ValueError as error:
            sys.exit(f"betoken.training.pair: {error}")
        torch.set_num_threads(options.threads)
        target, target_progress = recipe.train_target()
        draft_progress = recipe.train_draft(target)
        recipe.write_card(target_progress, draft_progress)
    except KeyboardInterrupt:
        log.info("interrupted: the same command goes on from the last checkpoint in %s", options.run_dir)
        sys.exit(130)
    log.info("done: %s", options.out)


if __name__ == "__main__":
    main()
