"""Steps of our engine and of llama.cpp on a GGUF file, in turn, in one process.

    python -m betoken.bench.llama_cpp.steps --target FILE.gguf [--other DIR] [--rows 1 6 32] [--rounds 40]

A step is one sequence's block of rows after 128 tokens, with logits of every row, as verification asks for them.
llama.cpp runs the file itself and the same weights in each of its `--formats`. `--other` names another checkpoint for
our own engine. Every round runs all sides close in time, in an order of chance. The last stdout line is one JSON
object.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from betoken.bench.command import exit_status, positive
from betoken.bench.llama_cpp.model import FORMATS, LlamaModel, load_library, open_models
from betoken.bench.machine import describe_hardware, describe_versions, num_cores
from betoken.bench.matrix import DTYPES
from betoken.bench.paired_ratio import estimate
from betoken.engine.attention import register_attention
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig

CONTEXT = 128
NUM_WARM_UP = 5
REST_S = 0.03
"""Wait before a side's turn: threads of the side before it spin for some milliseconds after their last step."""
Step = Callable[[list[int]], None]
BETOKEN = "betoken"


def our_step(target: Path, context: list[int], options: argparse.Namespace) -> Step:
    """A step of our engine after the context, to the first logit on the host."""
    num_pages = -(-(CONTEXT + max(options.rows)) // 16) + 16
    config = EngineConfig(
        str(target), dtype=options.dtype, num_threads=options.threads, num_pages=num_pages, compile=options.compile
    )
    runner = load_runner(config)
    page_ids, _ = runner.page_table.allocate(range(CONTEXT + max(options.rows)))
    runner.forward([Segment(page_ids, 0, context, 0)])

    def step(block: list[int]) -> None:
        runner.forward([Segment(page_ids, CONTEXT, block, len(block))]).logits[0, 0].item()

    return step


def their_step(model: LlamaModel, context: list[int]) -> Step:
    """A step of llama.cpp after the context, to the first row's logits."""
    model.forward(context, 0, 1)

    def step(block: list[int]) -> None:
        model.forward(block, CONTEXT, len(block))
        model.wait()

    return step


def measure(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Seconds by side and number of rows, an entry for each round."""
    rng = random.Random(0)
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in options.rows} for name in steps}
    for index in range(NUM_WARM_UP + options.rounds):
        for name in rng.sample(list(steps), len(steps)):
            time.sleep(REST_S)
            for rows in options.rows:
                block = [rng.randrange(options.max_id) for _ in range(rows)]
                start = time.perf_counter()
                steps[name](block)
                if index >= NUM_WARM_UP:
                    times[name][rows].append(time.perf_counter() - start)
    return times


def report(times: dict[str, dict[int, list[float]]]) -> dict[str, Any]:
    """Median times, milliseconds, each number of rows by one row, and our ratios to the other sides."""
    ours = times[BETOKEN]
    sides = {
        name: {
            "ms": {rows: round(1000 * median(seconds), 3) for rows, seconds in by_rows.items()},
            "by_first": {
                rows: round(
                    median(many / one for many, one in zip(seconds, next(iter(by_rows.values())), strict=True)), 3
                )
                for rows, seconds in by_rows.items()
            },
        }
        for name, by_rows in times.items()
    }
    ratios = {
        name: {
            rows: asdict(estimate([one / other for one, other in zip(ours[rows], by_rows[rows], strict=True)]))
            for rows in by_rows
        }
        for name, by_rows in times.items()
        if name != BETOKEN
    }
    return {"sides": sides, "ratios": ratios}


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    library = load_library()
    register_attention()
    with open_models(library, options.target, options.formats, options.threads) as loaded:
        options.max_id = min(model.vocab_size for model in loaded.values())
        rng = random.Random(1)
        context = [rng.randrange(options.max_id) for _ in range(CONTEXT)]
        steps = {BETOKEN: our_step(options.target, context, options)}
        if options.other is not None:
            steps[f"betoken, {options.other.name}"] = our_step(options.other, context, options)
        steps |= {f"llama.cpp {name}": their_step(model, context) for name, model in loaded.items()}
        result = report(measure(steps, options))
    for name, side in result["sides"].items():
        ratios = "  ".join(f"{rows}: {ratio['ratio']:.3f}" for rows, ratio in result["ratios"].get(name, {}).items())
        print(f"{name:<24} ms {side['ms']}  by one row {side['by_first']}  {'ours by it ' + ratios if ratios else ''}")
    about = {"hardware": describe_hardware(), "versions": describe_versions()}
    print(json.dumps({"bench": "llama_cpp.steps"} | result | about))
    return 0


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options from the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.llama_cpp.steps", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="GGUF file")
    add("--other", type=Path, help="another checkpoint for our engine, e.g. the same model in bf16")
    add("--formats", nargs="*", choices=FORMATS, default=("q4_0",), help="further formats for llama.cpp")
    add("--rows", nargs="+", type=positive, default=(1, 6, 32), help="rows of a step")
    add("--rounds", type=positive, default=40, help="measured rounds of all sides")
    add("--dtype", choices=DTYPES, default="bfloat16", help="our activations")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="compile our forward")
    add("--threads", type=positive, default=num_cores(), help="CPU threads of each side")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(exit_status("betoken.bench.llama_cpp.steps", lambda: run(parse_options())))
