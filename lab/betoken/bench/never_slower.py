"""The never-slower table: speeds with speculation over speeds without it, in one service, by load.

    python -m betoken.bench.never_slower --target DIR --draft DIR --prompts FILE --minutes 30

A cell is a number of streams, a temperature, and bursts of short answers or long runs. Its groups of requests run one
after the other in random order: one group without speculation and one for each drafter. All cells take turns until the
time is over. A ratio is decided if its 95 % interval is on one side of --bound. Speeds are printed only if all answers
of a group equal those without speculation. The speed of a group goes by its last answer; a row also has the ratio of
the mean times of an answer, and the speed ratio that the speculation policy predicted when the answers ended. Progress
goes to stderr; the last stdout line is one JSON object.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from betoken.bench.command import exit_status, positive, temperature
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import DTYPES, NO_DRAFTER
from betoken.bench.paired_ratio import PairedRatio, estimate
from betoken.bench.prompts import OWN_PROMPTS, Prompt, load_prompts
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import AsyncClient, Speculation

DEFAULT = "default"
"""Requests that name no drafter."""
BURST, LONG = "burst", "long"


class Cell(NamedTuple):
    """A load."""

    num_streams: int
    kind: str
    temperature: float


class Group(NamedTuple):
    """Result of one group of requests."""

    tokens_per_s: float
    answer_s: float
    """Mean time of an answer, seconds."""
    answers: list[list[int]]
    predicted: list[float]
    """Speed-ups that the speculation policy expected, of answers for which it knows one."""


class NeverSlower:
    """Measures all cells in turn on a running service."""

    def __init__(self, options: argparse.Namespace, client: AsyncClient, prompts: Sequence[Prompt]) -> None:
        self._options = options
        self._client = client
        self._prompts = prompts
        self._random = random.Random(0)
        self.ratios: defaultdict[tuple[Cell, str], list[float]] = defaultdict(list)
        self.answers: defaultdict[tuple[Cell, str], list[float]] = defaultdict(list)
        """Mean times of an answer without speculation over those with it."""
        self.predicted: defaultdict[tuple[Cell, str], list[float]] = defaultdict(list)
        """Speed ratios by the speculation policy."""
        self.differences: list[str] = []
        """Drafters and cells whose answers differed from those without speculation."""

    async def run(self) -> None:
        """Measure until the time is over; the first pass is complete, and warms up."""
        options = self._options
        cells = [Cell(*cell) for cell in product(options.streams, options.kinds, options.heat)]
        end_s, number = math.inf, 0
        while time.monotonic() < end_s:
            for cell in cells:
                if time.monotonic() < end_s:
                    await self._pairs(cell, number)
            if number == 0:
                end_s = time.monotonic() + 60 * options.minutes
            left_s = max(0.0, end_s - time.monotonic())
            print(f"pass {number} of {len(cells)} cells done, {left_s / 60:.1f} min left", file=sys.stderr)
            number += 1

    async def _pairs(self, cell: Cell, number: int) -> None:
        """One group of each drafter and one without, in random order; the first pass does not count."""
        names = [NO_DRAFTER, *self._options.drafters]
        self._random.shuffle(names)
        groups = {name: await self._group(cell, name, number) for name in names}
        plain = groups.pop(NO_DRAFTER)
        for name, group in groups.items():
            if group.answers != plain.answers:
                self.differences.append(f"{name}, {cell.num_streams} streams, {cell.kind}, T = {cell.temperature:g}")
            if number:
                self.ratios[cell, name].append(group.tokens_per_s / plain.tokens_per_s)
                self.answers[cell, name].append(plain.answer_s / group.answer_s)
                self.predicted[cell, name] += group.predicted

    async def _group(self, cell: Cell, name: str, number: int) -> Group:
        """All streams of a cell at once."""
        options = self._options
        num_tokens = options.burst_tokens if cell.kind == BURST else options.long_tokens
        speculate = Speculation() if name == DEFAULT else speculation(name)
        first = number * cell.num_streams
        start_s = time.perf_counter()
        completions = await asyncio.gather(
            *(
                generate(
                    self._client,
                    self._prompts[seed % len(self._prompts)].text,
                    sampling(num_tokens, cell.temperature, seed=seed, ignore_eos=True),
                    speculate,
                )
                for seed in range(first, first + cell.num_streams)
            )
        )
        seconds = time.perf_counter() - start_s
        answers = [list(one.completion.output_ids) for one in completions]
        policies = [one.completion.speculation.policy for one in completions]
        predicted = [policy.expected_speedup for policy in policies if policy is not None and policy.expected_speedup]
        return Group(sum(map(len, answers)) / seconds, mean(one.seconds for one in completions), answers, predicted)


def verdict(found: PairedRatio, bound: float) -> str:
    """Return the decision on a ratio: never slower than `bound`, slower, or undecided."""
    is_at_least = found.is_at_least(bound)
    if is_at_least is None:
        return "undecided"
    return f">= {bound:g}" if is_at_least else f"below {bound:g}"


def rows(
    ratios: Mapping[tuple[Cell, str], list[float]],
    answers: Mapping[tuple[Cell, str], list[float]],
    predicted: Mapping[tuple[Cell, str], list[float]],
    bound: float,
) -> list[dict[str, Any]]:
    """Return the table's rows as JSON objects."""
    table = []
    for (cell, name), values in sorted(ratios.items()):
        found = estimate(values)
        figures = {"ratio": round(found.ratio, 3), "low": round(found.low, 3), "high": round(found.high, 3)}
        row = {"drafter": name, **figures, "num_pairs": found.num_pairs, "verdict": verdict(found, bound)}
        row["answers"] = round(estimate(answers[cell, name]).ratio, 3)
        expected = predicted.get((cell, name))
        row["predicted"] = round(mean(expected), 3) if expected else None
        table.append(cell._asdict() | row)
    return table


def markdown(table: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table of Markdown."""
    lines = ["| streams | requests | T | drafter | speed ratio | 95 % interval | predicted | pairs | verdict |"]
    lines.append("|---:|---|---:|---|---:|---|---:|---:|---|")
    for row in table:
        interval = f"[{row['low']:.3f}, {row['high']:.3f}]"
        load = f"| {row['num_streams']} | {row['kind']} | {row['temperature']:g} | `{row['drafter']}` "
        predicted = "" if row["predicted"] is None else f"{row['predicted']:.2f}"
        ratios = f"{row['ratio']:.3f} | {interval} | {row['answers']:.3f} | {predicted}"
        lines.append(f"{load}| {ratios} | {row['num_pairs']} | {row['verdict']} |")
    return "\n".join(lines)


async def measure(options: argparse.Namespace) -> int:
    """Start the services, measure, print; 1 if an answer differed, 2 if nothing could be measured."""
    async with Stack(services(options)) as stack:
        longest = max(options.burst_tokens, options.long_tokens)
        prompts = await stack.fitting(load_prompts(options.prompts)[: options.limit], longest, file=sys.stderr)
        if not prompts:
            raise ValueError(f"no prompt fits the context with {longest} tokens")
        bench = NeverSlower(options, stack.client, prompts)
        await bench.run()
    if bench.differences:
        print("\n".join(f"answers differ: {difference}" for difference in bench.differences))
        return 1
    table = rows(bench.ratios, bench.answers, bench.predicted, options.bound)
    print(markdown(table))
    about = {"hardware": describe_hardware(), "versions": describe_versions(), "bound": options.bound}
    print(json.dumps(about | {"dtype": options.dtype, "prompts": options.prompts.name, "cells": table}))
    return 0


def services(options: argparse.Namespace) -> LocalServicesConfig:
    """Return one service for all drafters: n-grams attached to the verify worker, the usual ones on a draft worker."""
    most = max(options.streams)
    return LocalServicesConfig(
        target=options.target,
        draft=options.draft,
        attached_drafters=["ngram"],
        dtype=options.dtype,
        verify_threads=options.verify_threads,
        draft_threads=options.draft_threads,
        prefix_caching=False,  # groups repeat their prompts
        verify_options=["--max-sequences", str(max(most, 64))],
        draft_options=["--max-sequences", str(max(most, 64))],
    )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m betoken.bench.never_slower", description=__doc__)
    add = parser.add_argument
    add("--target", required=True, help="target model: directory, GGUF file or hub id")
    add("--draft", required=True, help="draft model: directory, GGUF file or hub id")
    add("--prompts", type=Path, default=OWN_PROMPTS, help=".jsonl or .jsonl.gz with `prompt` or `turns` (default: own)")
    add("--limit", type=positive, help="only the first N prompts")
    add("--drafters", nargs="+", default=[DEFAULT, "ngram", "model", "fused"], help=f"{DEFAULT} = none is named")
    add("--streams", nargs="+", type=positive, default=[1, 4, 16, 64], help="requests at once")
    add("--kinds", nargs="+", choices=(BURST, LONG), default=[BURST, LONG], help="lengths of answers")
    add("--burst-tokens", type=positive, default=96, help="tokens of an answer of a burst")
    add("--long-tokens", type=positive, default=384, help="tokens of an answer of a long run")
    add("--temperatures", dest="heat", nargs="+", type=temperature, default=[0.0, 0.8], help="0 = greedy")
    add("--bound", type=float, default=0.98, help="speed ratio that a cell has to reach")
    add("--minutes", type=float, default=30.0, help="time after the first pass, which always ends")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of both models")
    add("--verify-threads", type=positive, help="threads of the verify worker (default: its own choice)")
    add("--draft-threads", type=positive, default=1, help="threads of the draft worker")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    options = parse_options(arguments)
    return exit_status("betoken.bench.never_slower", lambda: asyncio.run(measure(options)))


if __name__ == "__main__":
    sys.exit(main())
