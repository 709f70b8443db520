"""Tokens a forward on a file of prompts: `betoken train measure --target DIR --drafter DIR --prompts FILE`.

Counts, no timings: the target's greedy answers are made by the engine, and what a drafter would have had accepted in
every round follows from one forward over each. Takes Medusa heads, an EAGLE-3 layer (chains) or a model (chains).
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from betoken.drafters.eagle3.checkpoint import TargetShape, load_layer
from betoken.drafters.eagle3.module import Eagle3Layer
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.training import draft, eagle3, eagle3_layer, medusa
from betoken.training.answers import ParamsOf, cycled_params, write_answers
from betoken.training.medusa_heads import WEIGHTS_FILE, load_heads
from betoken.training.recipe_card import table
from betoken.training.samples import Sample, read_prompts
from betoken.training.teacher import Teacher

log = logging.getLogger("betoken.training")

CHAINS = 7
"""Longest chain of an EAGLE-3 layer."""


def measure_medusa(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens a forward by the size of trees grown best first."""
    trainee = medusa.MedusaTrainee(teacher, load_heads(folder).to(teacher.device), medusa.LossWeights(), None)
    guesses = [medusa.head_guesses(trainee, sample, teacher.device) for sample in samples]
    return {f"tree of {num}": n for num, n in medusa.block_efficiency(guesses, samples, medusa.NODES).items()}


def measure_eagle3(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens a forward by the length of chains.

    Raises:
        ModelRefusedError: it is no EAGLE-3 layer for this target.
    """
    config = teacher.config
    vocab_size = teacher.head.weight.shape[0]
    shape = TargetShape(teacher.name, vocab_size, config.hidden_size, config.num_hidden_layers)
    layer = load_layer(folder, shape).layer
    if not isinstance(layer, Eagle3Layer):
        raise ValueError(f"{folder}: weights of EAGLE-1 or EAGLE-2 are not measured")
    trainee = eagle3_layer.Eagle3Trainee(teacher, layer.float().to(teacher.device), CHAINS, 1.0)
    _, efficiency = eagle3.chain_accuracy(trainee, samples, teacher.device)
    return {f"chain of {num}": found for num, found in efficiency.items()}


def measure_model(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens a forward with chains of a draft model."""
    model = Teacher.load(str(folder), "bfloat16", str(teacher.device)).model
    return {f"chain of {draft.CHAIN}": draft.agreement(teacher, model, samples).block_efficiency}


def measure(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> dict[str, float]:
    """Tokens a forward by what is drafted, of whatever drafter the folder holds."""
    if (folder / WEIGHTS_FILE).exists():
        return measure_medusa(teacher, folder, samples)
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return (measure_eagle3 if "Eagle3" in names[0] else measure_model)(teacher, folder, samples)


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each drafter."""
    parser = argparse.ArgumentParser(prog="betoken.training.measure", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True)
    add("--drafter", type=Path, nargs="+", required=True, help="folders of drafters")
    add("--prompts", type=Path, required=True, help="JSONL of prompts, which nothing was trained on")
    add("--limit", type=int, default=24, help="prompts")
    add("--max-new-tokens", type=int, default=128)
    add("--answers", type=Path, required=True, help="file to keep the target's answers in")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, AutoTokenizer.from_pretrained(options.target), options.limit)

    def load() -> ModelRunner:
        return load_runner(EngineConfig(options.target, num_threads=options.threads, device=options.device))

    def params(runner: ModelRunner) -> ParamsOf:
        return cycled_params(runner, [0.0], options.max_new_tokens, 0, ignore_eos=True)

    samples = write_answers(load, prompts, params, options.answers)
    teacher = Teacher.load(options.target, "bfloat16", options.device)
    for folder in options.drafter:
        found = measure(teacher, folder, samples)
        print(f"{folder}, {len(samples)} prompts\n")
        print(table(list(found), [[f"{value:.2f}" for value in found.values()]]) + "\n")


if __name__ == "__main__":
    main()
