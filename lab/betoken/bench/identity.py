"""The exactness matrix: every way of running a prompt gives the tokens it must give.

    python -m betoken.bench.identity --target DIR --draft DIR --prompts FILE --out DIR

Finished cells are kept in the --out folder and not run again, so a run can be interrupted and resumed. The last stdout
line is one JSON object with the commit and machine of every cell. The exit status is 1 when a cell failed and 2 when
nothing was compared.
"""

import argparse
import asyncio
import fnmatch
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from betoken.bench.attached_weights import add_weights, take_weights, weight_flag
from betoken.bench.command import EXIT_NOTHING_MEASURED, exit_status, positive
from betoken.bench.identity_store import IdentityStore
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import BUILT_IN, FUSED, MASKED, TOP_P, TRANSLATED, WITH_WEIGHTS, Cell, all_cells
from betoken.bench.matrix_runner import MatrixRunner, RunnerConfig
from betoken.bench.near_tie import MAX_GAP
from betoken.bench.pard import make_pard
from betoken.bench.prompts import OWN_PROMPTS, Prompt, fingerprint, load_prompts
from betoken.bench.stored_targets import STORED, StoredTarget, make_stored
from betoken.drafters.host.making import resolve_built_in
from betoken.drafters.registry import BUILT_IN as BUILT_IN_DRAFTERS
from betoken.engine.weights.sources import open_source

_PARD = "pard"
RULE = (
    f"near-tie rule (float32 against transformers only): at the first differing position the two best logits are less "
    f"than {MAX_GAP:g} apart in both runs; more than 2 of 164 prompts fails. Our own runs must be equal."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix; 1 when a cell failed, 2 when nothing could be run or was compared."""
    options = _parse(arguments)
    return exit_status("betoken.bench.identity", lambda: _run(options), kept=options.out)


def _run(options: argparse.Namespace) -> int:
    prompts = load_prompts(options.prompts, options.limit)
    cells = [cell for cell in all_cells() if any(fnmatch.fnmatch(cell.name, pattern) for pattern in options.cells)]
    if not cells:
        raise ValueError(f"no cell is named {' or '.join(options.cells)}")
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    stored = StoredTarget(options.target, "")
    if options.stored:
        stored = make_stored(options.stored, options.target, options.out.parent)
    weights = take_weights(vars(options))
    makes_pard = _PARD not in weights and not options.draft.endswith(".gguf")
    if makes_pard:
        weights[_PARD] = str(options.out / _PARD)
    attached = {cell.services.attached for cell in cells}
    held = SimpleNamespace(model=stored.target, revision=None, synthetic="", attached_drafters=(BUILT_IN_DRAFTERS,))
    built_in = resolve_built_in(held) if attached.intersection((*BUILT_IN, FUSED)) else ()
    others = {MASKED: weights.get(_PARD, ""), TRANSLATED: options.translated}
    draft_models = {kind: model for kind, model in others.items() if model}
    cells, left_out = _possible(cells, {*weights, *built_in, *draft_models})
    store = IdentityStore(options.out, _manifest(options, stored.target, prompts))
    shared = (options.max_new_tokens, options.few_pages, options.compile, options.device, options.prefix_caching)
    if makes_pard and any(cell.drafting.model == MASKED or cell.services.attached in (_PARD, FUSED) for cell in cells):
        make_pard(options.draft, Path(weights[_PARD]))
    drafting = (weights, stored.dequantised, built_in, draft_models)
    config = RunnerConfig(stored.target, options.draft, *shared, *drafting, options.tensor_parallel, options.overlap)
    print(f"{len(cells)} cells, {len(prompts)} prompts, {len(store.done)} cells done already\n{RULE}\n", flush=True)
    asyncio.run(MatrixRunner(config, prompts, store, _print_cell).run(cells))
    summary = summarize(cells, store) | {"left_out": left_out, "stored": options.stored}
    print(json.dumps(summary))
    if summary["failed_cells"]:
        return 1
    if not summary["compared"]:
        print("nothing was compared: what other cells are held to equals itself", file=sys.stderr)
        return EXIT_NOTHING_MEASURED
    return 0


def _manifest(options: argparse.Namespace, target: str, prompts: list[Prompt]) -> dict[str, Any]:
    """The options that results depend on."""
    manifest: dict[str, Any] = {
        "target": open_source(target, None).fingerprint(),
        "draft": open_source(options.draft, None).fingerprint(),
        "prompts": fingerprint(prompts),
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "top_p": TOP_P,
        "few_pages": options.few_pages,
        "compile": options.compile,
        "device": options.device,
        "prefix_caching": options.prefix_caching,
    }
    if options.tensor_parallel > 1:
        manifest["tensor_parallel"] = options.tensor_parallel
    if options.overlap != "off":
        manifest["overlap"] = options.overlap
    return manifest


def _possible(cells: Sequence[Cell], given: Collection[str]) -> tuple[list[Cell], list[str]]:
    """The cells that can run, and the names of those whose drafter or draft model is not given.

    `given`: attached drafters that have weights, and kinds of draft models.

    Raises:
        ValueError: none can run.
    """
    needs = {name: weight_flag(name) for name in WITH_WEIGHTS} | {name: f"{name} layers" for name in BUILT_IN}
    needs |= {MASKED: "--pard", TRANSLATED: "--translated"}
    needs |= {} if given else {FUSED: "weights"}  # attached, it needs one of them in addition to `ngram`
    lacking = {
        cell.name: needs[need]
        for cell in cells
        for need in (cell.drafting.model, cell.services.attached)
        if need in needs and need not in given
    }
    if len(lacking) == len(cells):
        raise ValueError(f"these cells need {' or '.join(dict.fromkeys(lacking.values()))}")
    if lacking:
        missing = " and ".join(dict.fromkeys(lacking.values()))
        print(f"{len(lacking)} cells left out, without {missing}", file=sys.stderr)
    return [cell for cell in cells if cell.name not in lacking], list(lacking)


def summarize(cells: Sequence[Cell], store: IdentityStore) -> dict[str, Any]:
    """Counts over the asked-for cells."""
    records = [store.done[cell.name] for cell in cells if cell.name in store.done]
    names = ("compared", "identical", "near_ties", "failed")
    return {
        "cells": len(records),
        **{name: sum(record[name] for record in records) for name in names},
        "failed_cells": [record["cell"] for record in records if not record["passed"]],
        "commits": sorted({record["commit"] for record in records}),
        "machines": sorted({record.get("machine", "unknown") for record in records}),
        "are_pages_free": all(record["are_pages_free"] for record in records),
        "hardware": describe_hardware(),
        "versions": describe_versions(),
    }


def _print_cell(record: dict[str, Any]) -> None:
    state = "passed" if record["passed"] else "FAILED"
    counts = f"{record['identical']}/{record['compared']} identical, {record['near_ties']} near-ties"
    if not record["compared"]:
        counts = "nothing to compare with"
    disturbances = {"strikes": record["num_strikes"], "preemptions": record["num_preemptions"]}
    extra = "".join(f", {count} {what}" for what, count in disturbances.items() if count)
    faults = {"are_pages_free": "PAGES LEAKED", "is_disturbed": "NOTHING DISTURBED: too few tokens, or enough pages"}
    extra += "".join(f", {fault}" for name, fault in faults.items() if not record[name])
    print(f"{record['cell']:<42} {state}  {counts}{extra}  {record['seconds']:.0f} s", flush=True)
    for difference in record["differences"]:
        print(f"    {difference}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.identity", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="target model: directory or hub id")
    add("--stored", choices=STORED, default="", help="store the target's weights in this format, next to the results")
    add("--draft", required=True, help="draft model: directory or hub id")
    add("--translated", default="", metavar="DIR", help="draft model with another tokenizer (default: no such cells)")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, help="only the first N prompts")
    add("--max-new-tokens", type=positive, default=128, help="tokens per answer")
    add("--cells", nargs="+", default=["*"], metavar="PATTERN", help="shell patterns of cell names (see --list)")
    add("--list", action="store_true", help="print the cells' names and stop")
    add("--out", type=Path, default=Path("runs/identity"), help="folder of the results; resumed when it exists")
    add("--few-pages", type=positive, default=64, help="KV pages in the cells that force preemption")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="torch.compile in the workers")
    add("--device", default="cpu", help="of all models on both sides, e.g. cuda:0")
    add("--tensor-parallel", type=positive, default=1, help="processes that share each model")
    add("--overlap", choices=("off", "on", "auto"), default="off", help="overlapped rounds, the router's option")
    add("--prefix-caching", action="store_true", help="let cells find the KV that cells before them left")
    add_weights(parser)  # without, their cells are left out, except `pard`: --draft with an untrained mask token
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
