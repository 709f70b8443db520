"""DistillSpec's table: each divergence on each kind of data, before and after, on held-out prompts.

`betoken train distill-table` takes the options of the recipe `draft`, trains a draft for every cell from the same start
and writes one table. Finished cells are kept in the run folder.

Source: Zhou et al., DistillSpec, arXiv:2310.08461.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import shutil

import torch

from betoken.training import draft
from betoken.training.distill import DIVERGENCES
from betoken.training.draft import MEASURES, SOURCES, Agreement, DraftTrainee, measured
from betoken.training.model_card import table
from betoken.training.recipe import Recipe, run_recipe
from betoken.training.samples import read_prompts
from betoken.training.teacher import Teacher

log = logging.getLogger("betoken.training")

_SHARED = ("answers.jsonl", "held_out.jsonl")
"""The target's answers, equal for all cells."""


def cell_options(options: argparse.Namespace, source: str, divergence: str) -> argparse.Namespace:
    """The recipe's options for one cell."""
    cell = copy.copy(options)
    cell.source, cell.divergence = source, divergence
    cell.run_dir = options.run_dir / f"{source}_{divergence}"
    cell.out = cell.run_dir / "out"
    cell.run_dir.mkdir(parents=True, exist_ok=True)
    for name in _SHARED:
        if (found := options.run_dir / name).exists():
            shutil.copy(found, cell.run_dir / name)
    return cell


def table_text(before: Agreement, cells: dict[str, Agreement]) -> str:
    """The table in Markdown; the best of each column is bold."""
    rows = [("before", "", before)]
    rows += [(name, source, cells[f"{source} {name}"]) for source in SOURCES for name in DIVERGENCES]
    texts = [measured(found) for _, _, found in rows]
    for column in range(len(MEASURES)):
        best = max(text[column] for text in texts)
        for text in texts:
            text[column] = f"**{text[column]}**" if text[column] == best else text[column]
    named = [[name, source, *text] for (name, source, _), text in zip(rows, texts, strict=True)]
    return table(["divergence", "data", *MEASURES], named) + "\n"


def run(options: argparse.Namespace) -> None:
    """Train what is missing and write the table.

    Raises:
        OSError, ValueError: a file or an option is not as it has to be.
    """
    for name in ("prompts", "texts"):
        if getattr(options, name) is None:
            raise ValueError(f"{name}: needed, every kind of data has a cell")
    whole = Recipe("distill-table", options)
    teacher = Teacher.load(options.target, options.dtype, options.device)
    held_out = draft.held_out_answers(whole)
    whole.answers(read_prompts(options.prompts, whole.tokenizer(), options.num_prompts))
    before = draft.agreement(teacher, draft.initial_draft(options, teacher), held_out)
    log.info("before: %s", ", ".join(measured(before)))
    cells: dict[str, Agreement] = {}
    for source in SOURCES:
        known: dict[tuple[int, ...], torch.Tensor] = {}
        for name in DIVERGENCES:
            cell = cell_options(options, source, name)
            path = cell.run_dir / "measured.json"
            if not path.exists():
                trainee = DraftTrainee(teacher, draft.initial_draft(cell, teacher), DIVERGENCES[name])
                trainee.known_logits, trainee.keeps_logits = known, source in ("text", "target")
                draft.distil(Recipe("draft", cell), trainee, teacher, held_out)
                found = draft.agreement(teacher, trainee.draft, held_out)
                path.write_text(json.dumps([found.greedy, found.sampled, found.block_efficiency]))
            cells[f"{source} {name}"] = Agreement(*json.loads(path.read_text()))
            log.info("%s, %s: %s", source, name, ", ".join(measured(cells[f"{source} {name}"])))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(table_text(before, cells))


def main(arguments: list[str] | None = None) -> None:
    """Run every cell that is not done yet."""
    parser = draft.make_parser("betoken.training.distill_table")
    run_recipe("betoken.training.distill_table", run, parser.parse_args(arguments))


if __name__ == "__main__":
    main()
