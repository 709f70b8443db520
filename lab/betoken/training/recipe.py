"""Shared parts of the recipes for drafters: options, data, the run folder and the card.

Knows prompts, texts and answers; it does not know which drafter is trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import COMPILE_CHOICES, EngineConfig
from betoken.engine.errors import EngineError
from betoken.engine.runner import ModelRunner
from betoken.training.answers import cycled_params, write_answers
from betoken.training.loop import LoopSettings
from betoken.training.samples import Sample, clip, read_prompts, read_texts
from betoken.training.schedule import Budget

log = logging.getLogger("betoken.training")

_PLACES = ("out", "run_dir", "threads", "device", "note")
"""Options that change nothing of what is made."""


def recipe_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The options of every recipe for a drafter."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True, help="checkpoint of the target: any that the engine serves")
    add("--out", type=Path, required=True, help="folder to write the drafter, its card and the loss plot to")
    add(
        "--run-dir", type=Path, required=True, help="folder for answers and checkpoints; the same command goes on there"
    )
    add("--prompts", type=Path, help="JSONL of prompts (`prompt`, `messages` or `turns`) for the target to answer")
    add("--num-prompts", type=int, help="take the first so many only")
    add("--texts", type=Path, help="JSONL of given text (`text`, or a prompt and `completion`)")
    add("--max-new-tokens", type=int, default=192, help="longest answer, tokens")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 0.0, 1.0], help="of the answers, in turn")
    add("--learn-prompts", action="store_true", help="learn from prompts, too, as from given text")
    add("--max-length", type=int, default=512, help="longest sequence, tokens")
    add("--num-held-out", type=int, default=100, help="sequences that are measured on and not learnt from")
    add("--tokens", type=int, help="budget: tokens to predict")
    add("--minutes", type=float, help="budget: minutes of training")
    add("--batch-rows", type=int, default=16, help="sequences in a batch")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", choices=COMPILE_CHOICES, default="auto", help="whether the engine compiles what makes answers")
    add("--dtype", default="bfloat16", help="the target's type")
    add("--note", default="", help="words about the machine for the card")
    return parser


@dataclass(frozen=True, slots=True)
class Data:
    """Sequences to learn from and to measure on."""

    training: Sequence[Sample]
    held_out: Sequence[Sample]

    def described(self) -> str:
        """Counts, for the card."""
        learnt = sum(len(sample.ids) - max(1, sample.prompt_length) for sample in self.training)
        return f"{len(self.training)} sequences with {learnt / 1e6:.2f}M tokens to learn, {len(self.held_out)} held out"


class Recipe:
    """One run: its options are checked and kept, its data made once."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        """Raises:
        ValueError: an option is out of range, or the run folder belongs to another recipe.
        """
        _check_values(options)
        self.options, self._name = options, name
        options.run_dir.mkdir(parents=True, exist_ok=True)
        self._check_same()
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)

    @property
    def checkpoint(self) -> Path:
        """File of the checkpoint."""
        path: Path = self.options.run_dir / "checkpoint.pt"
        return path

    @property
    def loop_settings(self) -> LoopSettings:
        """The budget."""
        return LoopSettings(budget=Budget(tokens=self.options.tokens, minutes=self.options.minutes))

    @property
    def command(self) -> str:
        """The call, for the card."""
        start = next((index for index, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
        return shlex.join(["betoken", "train", self._name, *sys.argv[start:]])

    def tokenizer(self) -> Any:
        """The target's."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.options.target)

    def load_runner(self, model: str | None = None) -> ModelRunner:
        """A model (None: the target) in the engine, for answers."""
        options = self.options
        config = EngineConfig(
            model or options.target,
            dtype=options.dtype,
            device=options.device,
            num_threads=options.threads,
            compile=options.compile,
        )
        return load_runner(config)

    @property
    def max_length(self) -> int:
        """Longest sequence, tokens; no longer than the target takes."""
        return int(min(self.options.max_length, self.tokenizer().model_max_length))

    def data(self) -> Data:
        """The target's answers and given text, in that order; every n-th sequence is held out.

        Raises:
            OSError, ValueError: a file is not there, or not as it has to be.
        """
        options, tokenizer = self.options, self.tokenizer()
        samples = self.answers(read_prompts(options.prompts, tokenizer, options.num_prompts)) if options.prompts else []
        texts = read_texts(options.texts, tokenizer) if options.texts else []
        max_length = self.max_length
        data = split([*clip(samples, max_length), *clip(texts, max_length)], options.num_held_out)
        if options.learn_prompts:
            return Data([Sample(sample.ids, 0) for sample in data.training], data.held_out)
        return data

    def answers(self, prompts: list[list[int]]) -> list[Sample]:
        """The target's answers to prompts, kept in the run folder."""
        options = self.options

        def params(runner: ModelRunner) -> Any:
            return cycled_params(runner, options.temperatures, options.max_new_tokens, options.seed)

        return write_answers(self.load_runner, prompts, params, options.run_dir / "answers.jsonl")

    def _check_same(self) -> None:
        path = self.options.run_dir / "recipe.json"
        named = {name: value for name, value in vars(self.options).items() if name not in _PLACES}
        recipe = json.loads(json.dumps(named, default=str))
        found = json.loads(path.read_text()) if path.exists() else recipe
        for name, value in recipe.items():
            if found.get(name) != value:
                where = self.options.run_dir
                raise ValueError(f"{where} was made with {name} {found.get(name)!r}, this run has {value!r}")
        path.write_text(json.dumps(recipe, indent=1))


def split(samples: Sequence[Sample], num_held_out: int) -> Data:
    """Hold `num_held_out` samples out, evenly spread.

    Raises:
        ValueError: they are half of the samples or more.
    """
    if not 0 < num_held_out <= len(samples) // 2:
        raise ValueError(f"num_held_out {num_held_out}: must be 1 to half of the {len(samples)} sequences")
    step = len(samples) / num_held_out
    chosen = {int(index * step) for index in range(num_held_out)}
    held_out = [sample for index, sample in enumerate(samples) if index in chosen]
    return Data([sample for index, sample in enumerate(samples) if index not in chosen], held_out)


@contextmanager
def faults_in_a_line(prog: str) -> Iterator[None]:
    """Ends the program with one line if a file, an option or a model is invalid."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        yield
    except (ValueError, OSError, EngineError) as error:
        sys.exit(f"{prog}: {error}")


def run_recipe(prog: str, run: Any, options: argparse.Namespace) -> None:
    """Run `run(options)`; report faults and interruptions in one line."""
    try:
        with faults_in_a_line(prog):
            run(options)
    except KeyboardInterrupt:
        log.info("interrupted: the same command goes on from the last checkpoint in %s", options.run_dir)
        sys.exit(130)
    log.info("done: %s", options.out)


def _check_values(options: argparse.Namespace) -> None:
    if options.prompts is None and options.texts is None:
        raise ValueError("prompts, texts: one of them is needed")
    if (options.tokens is None) == (options.minutes is None):
        raise ValueError("tokens, minutes: exactly one of them is the budget")
    for name in ("tokens", "minutes", "num_prompts", "max_new_tokens", "batch_rows", "threads", "num_held_out"):
        if (value := getattr(options, name)) is not None and not value > 0:
            raise ValueError(f"{name} {value}: must be above 0")
    if options.max_length < 16:
        raise ValueError(f"max_length {options.max_length}: must be at least 16")
    if options.seed < 0:
        raise ValueError(f"seed {options.seed}: must be at least 0")
    try:
        torch.empty(0, device=options.device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device {options.device}: {error}") from error
