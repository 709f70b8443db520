"""Tokens a forward on a file of prompts: `betoken train measure --target DIR --drafter DIR --prompts FILE`.

Counts, no timings: the target's greedy answers are made by the engine, and what a drafter would have had accepted in
every round follows from them. Takes Medusa heads, an EAGLE-3 layer, a draft or PARD model and the drafter `ngram`.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from betoken.drafters.eagle3.checkpoint import LoadedLayer, load_layer
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.module import Eagle3Layer
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.page_table import PageTable
from betoken.engine.runner import ModelRunner
from betoken.training import draft, eagle3, eagle3_layer, medusa
from betoken.training.answers import ParamsOf, cycled_params, write_answers
from betoken.training.block_efficiency import Rounds
from betoken.training.medusa_heads import WEIGHTS_FILE, load_heads
from betoken.training.model_card import table
from betoken.training.recipe import faults_in_a_line
from betoken.training.replay import replay, states_of
from betoken.training.samples import Sample, read_prompts
from betoken.training.teacher import Teacher

log = logging.getLogger("betoken.training")

CHAINS = 7
"""Longest chain of an EAGLE-3 layer."""
TREES = (8, 16, 32)
"""Sizes of the trees of a drafter as it is served."""
NGRAM = "ngram"
"""Stands for the drafter of that name."""
MAX_SHOWN = 7
"""Positions in the table."""


Found = dict[str, Rounds]
"""Rounds by what is drafted."""


def measure_medusa(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> Found:
    """By the size of trees grown best first."""
    trainee = medusa.MedusaTrainee(teacher, load_heads(folder).to(teacher.device), medusa.LossWeights(), None)
    guesses = [medusa.head_guesses(trainee, sample, teacher.device) for sample in samples]
    return {f"tree of {num}": rounds for num, rounds in medusa.tree_rounds(guesses, samples, medusa.NODES).items()}


def measure_eagle3(teacher: Teacher, folder: Path, samples: Sequence[Sample], threads: int) -> Found:
    """By the length of chains, and by the size of the served drafter's trees.

    Raises:
        ModelRefusedError: it is not a layer for this target.
        ValueError: it is a layer of EAGLE-1 or EAGLE-2.
    """
    config = teacher.config
    vocab_size = teacher.head.weight.shape[0]
    shape = TargetShape(teacher.name, vocab_size, config.hidden_size, config.num_hidden_layers)
    layer = load_layer(folder, shape).layer
    if not isinstance(layer, Eagle3Layer):
        raise ValueError(f"{folder}: weights of EAGLE-1 or EAGLE-2 are not measured")
    trainee = eagle3_layer.Eagle3Trainee(teacher, layer.float().to(teacher.device), CHAINS, 1.0)
    _, by_length = eagle3.chain_accuracy(trainee, samples, teacher.device)
    found = {f"chain of {num}": rounds for num, rounds in by_length.items()}
    return found | _eagle3_trees(teacher, load_layer(folder, shape), samples, threads)


def _eagle3_trees(teacher: Teacher, loaded: LoadedLayer, samples: Sequence[Sample], threads: int) -> Found:
    layers = sorted(set(loaded.state_layers))
    config = EngineConfig(
        teacher.name,
        num_threads=threads,
        device=str(teacher.device),
        compile="off",
        feature_layers=lambda num_layers: layers,
    )
    runner = load_runner(config)
    states = [states_of(runner, sample.ids) for sample in samples]
    size = runner.page_table.page_size
    num_pages = sum((len(sample.ids) + max(TREES)) // size + 2 for sample in samples)
    forward = LayerForward(loaded, runner.parts, num_pages, size)
    columns = [layers.index(layer) for layer in loaded.state_layers]
    found: Found = {}
    for num in TREES:
        pages = SharedPages(PageTable(num_pages, size, prefix_caching=False), idle_grace_s=0.0)
        drafter = EagleDrafter(forward, pages, columns, runner.info.vocab_size, runner.max_num_batched_tokens)
        found[f"tree of {num}"] = replay(drafter, samples, num, states)
    return found


def measure_ngram(samples: Sequence[Sample]) -> Found:
    """By the size of the served drafter's trees."""
    return {f"tree of {num}": replay(NgramDrafter(), samples, num) for num in TREES}


def measure_model(teacher: Teacher, folder: Path, samples: Sequence[Sample]) -> Found:
    """With chains of a draft model."""
    model = Teacher.load(str(folder), "bfloat16", str(teacher.device)).model
    return {f"chain of {draft.CHAIN}": draft.agreement(teacher, model, samples).rounds}


def measure_pard(folder: Path, samples: Sequence[Sample], threads: int, device: str) -> Found:
    """By the length of the served drafter's chains: rows of rounds alone, not of drafts after every token.

    Raises:
        ModelRefusedError: the model cannot be served.
    """
    config = EngineConfig(str(folder), num_threads=threads, device=device, compile="off")
    num_pages = sum((len(sample.ids) + max(TREES)) // config.page_size + 2 for sample in samples)
    runner = load_runner(replace(config, num_pages=num_pages))
    found: Found = {}
    for num in TREES:
        num_rows = runner.max_num_batched_tokens
        drafter = ModelDrafter(runner, num_rows, num_rows, mask_token_id=runner.info.mask_token_id)
        found[f"chain of {num}"] = replay(drafter, samples, num)
    return found


def measure(teacher: Teacher, folder: Path, samples: Sequence[Sample], threads: int) -> Found:
    """Rounds by what is drafted, of whatever drafter the folder holds, or of the drafter `ngram`."""
    if str(folder) == NGRAM:
        return measure_ngram(samples)
    if (folder / WEIGHTS_FILE).exists():
        return measure_medusa(teacher, folder, samples)
    described = json.loads((folder / "config.json").read_text())
    names = described.get("architectures") or [""]
    if "Eagle3" in names[0]:
        return measure_eagle3(teacher, folder, samples, threads)
    if described.get("pard_token") is not None:
        return measure_pard(folder, samples, threads, str(teacher.device))
    return measure_model(teacher, folder, samples)


def found_table(found: Found) -> str:
    """Tokens a forward, and the share of rounds whose first, second, ... drafted token was accepted."""
    rows = [
        [name, f"{rounds.block_efficiency:.2f}", ", ".join(f"{share:.2f}" for share in rounds.by_position[:MAX_SHOWN])]
        for name, rounds in found.items()
    ]
    return table(["drafted", "tokens a forward", "accepted, by position"], rows)


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="betoken.training.measure", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True)
    add("--drafter", type=Path, nargs="+", required=True, help="folders of drafters, or `ngram`")
    add("--prompts", type=Path, required=True, help="JSONL of prompts, which nothing was trained on")
    add("--limit", type=int, default=24, help="prompts")
    add("--max-new-tokens", type=int, default=128)
    add("--until-end", action="store_true", help="answers stop at the target's EOS, as in chats")
    add("--answers", type=Path, required=True, help="file to keep the target's answers in")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--device", default="cpu")
    options = parser.parse_args(arguments)
    with faults_in_a_line("betoken.training.measure"):
        show_measured(options)


def show_measured(options: argparse.Namespace) -> None:
    """Print a table for each drafter.

    Raises:
        OSError, ValueError, EngineError: a file or a model is not as it has to be.
    """
    torch.set_num_threads(options.threads)
    prompts = read_prompts(options.prompts, AutoTokenizer.from_pretrained(options.target), options.limit)

    def load() -> ModelRunner:
        return load_runner(EngineConfig(options.target, num_threads=options.threads, device=options.device))

    def params(runner: ModelRunner) -> ParamsOf:
        return cycled_params(runner, [0.0], options.max_new_tokens, 0, ignore_eos=not options.until_end)

    samples = write_answers(load, prompts, params, options.answers)
    teacher = Teacher.load(options.target, "bfloat16", options.device)
    for folder in options.drafter:
        found = measure(teacher, folder, samples, options.threads)
        print(f"{folder}, {len(samples)} prompts\n")
        print(found_table(found) + "\n", flush=True)


if __name__ == "__main__":
    main()
