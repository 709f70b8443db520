"""How long a verify step takes on a GPU: against the time its weights take to read, and against transformers.

    python -m betoken.bench.step [--models llama-3-8b] [--weights w4a16] [--rows 1 5 64] [--contexts 512]

A step is one sequence's block of rows after a context: forward, greedy choice, one read of the ids on the host. It is
measured as wall time, median. Weights are random, bfloat16. The load check comes first. Then the recorded forward is
compared with the eager one and with its rows one at a time, to the last bit. A difference prints no speed. The floor is
the weights' bytes over the copy bandwidth measured here. The last stdout line is one JSON object.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

import torch

from betoken.bench.command import EXIT_NOTHING_MEASURED, positive
from betoken.bench.gpu.device import describe_device, require_device
from betoken.bench.gpu.step_baseline import StaticCacheSteps
from betoken.bench.gpu.step_models import (
    MODEL_NAMES,
    WEIGHTS,
    describe,
    make_model,
    read_bytes,
    round_weights,
    share_weights,
)
from betoken.bench.gpu.timing import DeviceTimer
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import runner_of
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams

PROGRAM = "python -m betoken.bench.step"
ROWS = (1, 2, 4, 5, 8, 16, 64)
CONTEXTS = (512, 4096)
NUM_WARM_UP = 5
NUM_TIMED = 40


class Stream:
    """One sequence of a runner whose context is written, and the blocks after it."""

    def __init__(self, runner: ModelRunner, ids: list[int], max_rows: int) -> None:
        self._runner = runner
        self._ids = ids
        self._page_ids, _ = runner.page_table.allocate(range(len(ids) + max_rows))
        for start in range(0, len(ids), runner.max_num_batched_tokens):
            chunk = ids[start : start + runner.max_num_batched_tokens]
            runner.forward([Segment(self._page_ids, start, chunk, 0)])

    def logits(self, block: list[int], offset: int = 0) -> torch.Tensor:
        """Logits of every row of a block, [rows, V]; the block begins `offset` tokens after the context."""
        segment = Segment(self._page_ids, len(self._ids) + offset, block, len(block))
        return self._runner.forward([segment]).logits.clone()

    def step(self, block: list[int]) -> list[int]:
        """The greedy id after each row of the block, on the host."""
        group = SampleGroup(SamplingParams(temperature=0.0), self._ids, block[:1], block[1:])
        segment = Segment(self._page_ids, len(self._ids), block, len(block))
        return choose_tokens(self._runner.forward([segment]).logits, [group]).token_ids

    def close(self) -> None:
        """Give the pages back."""
        self._runner.page_table.release(self._page_ids)


def find_faults(recorded: Stream, eager: Stream, blocks: Sequence[list[int]]) -> list[str]:
    """The differences in bits between the recorded and the eager forward, or between a row in a batch and alone."""
    faults = []
    for block in blocks:
        logits = recorded.logits(block)
        if not torch.equal(logits, eager.logits(block)):
            faults.append(f"{len(block)} rows: the recorded forward is not the eager one")
        alone = torch.cat([recorded.logits([token_id], row) for row, token_id in enumerate(block)])
        if not torch.equal(logits, alone):
            faults.append(f"{len(block)} rows: a row among them is not the row alone")
    return faults


def time_ms(step: Callable[[list[int]], object], blocks: Sequence[list[int]]) -> float:
    """Median wall time of a step, milliseconds; blocks alternate, the first few steps are not counted."""
    durations = []
    for index in range(NUM_WARM_UP + NUM_TIMED):
        start = time.perf_counter()
        step(blocks[index % len(blocks)])
        durations.append(time.perf_counter() - start)
    return 1000 * median(durations[NUM_WARM_UP:])


def measure_model(name: str, weights: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Gate, then times, for every context and number of rows of one model and one way to store its weights."""
    model = make_model(name, device)
    baseline = share_weights(model)
    round_weights(model, weights)
    info, num_bytes = describe(name, model), read_bytes(model)
    num_pages = -(-(max(options.contexts) + max(options.rows)) // 16)
    config = EngineConfig(info.model_id, device=str(device), num_pages=num_pages, compile=options.compile)
    try:
        recorded = runner_of(config, model, info)
    except ModelRefusedError as error:
        return {"model": name, "weights": weights, "faults": [str(error)]}
    eager = runner_of(replace(config, max_graph_rows=0, self_check=False), model, info)
    floor_ms = num_bytes / options.copy_bytes_per_s * 1000
    result: dict[str, Any] = {"model": name, "weights": weights, "numerics": recorded.numerics}
    result |= {"faults": [], "steps": []}
    generator = random.Random(0)
    for context in options.contexts:
        ids = [generator.randrange(info.vocab_size) for _ in range(context)]
        blocks = {
            rows: [[generator.randrange(info.vocab_size) for _ in range(rows)] for _ in range(4)]
            for rows in options.rows
        }
        streams = [Stream(runner, ids, max(options.rows)) for runner in (recorded, eager)]
        faults = find_faults(
            streams[0], streams[1], [block for row_blocks in blocks.values() for block in row_blocks[:1]]
        )
        result["faults"] += [f"context {context}, {fault}" for fault in faults]
        if not result["faults"]:
            for rows, row_blocks in blocks.items():
                times = {"betoken": round(time_ms(streams[0].step, row_blocks), 4)}
                entry = {"rows": rows, "context": context, "floor_ms": round(floor_ms, 4), "ms": times}
                result["steps"].append(entry | time_baseline(baseline, ids, row_blocks, times))
        for stream in streams:
            stream.close()
    if result["faults"]:
        del result["steps"]
    return result


def time_baseline(
    model: Any, ids: list[int], blocks: Sequence[list[int]], times: dict[str, float]
) -> dict[str, dict[str, str]]:
    """Adds transformers' times; returns why one could not be had."""
    failed = {}
    for name, is_compiled in (("transformers eager", False), ("transformers compiled", True)):
        try:
            steps = StaticCacheSteps(model, ids, len(blocks[0]), is_compiled)
            times[name] = round(time_ms(steps.step, blocks), 4)
        except Exception as error:  # another's compiler: its failure is an entry, not the end
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    return {"failed": failed} if failed else {}


def print_report(result: dict[str, Any]) -> None:
    """A line per step, or the faults."""
    print(f"\n{result['model']}, {result['weights']}")
    for fault in result["faults"]:
        print(f"    {fault}")
    if result["faults"]:
        print("    not right: no speeds")
        return
    for step in result["steps"]:
        times = "  ".join(f"{name} {ms:.3f} ms" for name, ms in step["ms"].items())
        over_floor = step["ms"]["betoken"] / step["floor_ms"]
        print(f"    {step['rows']:>3} rows after {step['context']:>5}: {times}  ({over_floor:.2f} x the floor)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare, measure, print; the status is 1 when a step was wrong and 2 without a GPU."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODEL_NAMES, default=MODEL_NAMES, help="shapes to measure")
    add("--weights", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="how weights are stored")
    add("--rows", nargs="+", type=positive, default=ROWS, help="new tokens of a step")
    add("--contexts", nargs="+", type=positive, default=CONTEXTS, help="tokens before them")
    add("--compile", choices=("auto", "on", "off"), default="auto", help="compile our forward")
    options = parser.parse_args(arguments)
    device = require_device(PROGRAM)
    if device is None:
        return EXIT_NOTHING_MEASURED
    torch.manual_seed(0)
    results = []
    options.copy_bytes_per_s = DeviceTimer(device).copy_bytes_per_s()
    for name, weights in product(options.models, options.weights):
        results.append(measure_model(name, weights, device, options))
        print_report(results[-1])
        torch.cuda.empty_cache()
    about = {"device": describe_device(device), "hardware": describe_hardware(), "versions": describe_versions()}
    copy_gb_per_s = round(options.copy_bytes_per_s / 1e9, 1)
    print(json.dumps({"bench": "step", "copy_gb_per_s": copy_gb_per_s, "models": results} | about))
    return 1 if any(result["faults"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
