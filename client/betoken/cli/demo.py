"""`betoken demo`: one completion with and without speculation on local services, side by side, and both speeds.

Speeds are medians over alternating repeats. Equality is checked against decoding without speculation in the served
dtype and, in a checkout, against `generate()` of `transformers` in float32. If a token differs, no speed is printed.
The last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from betoken.cli import connection as c
from betoken.cli import starting, up_checks
from betoken.cli.provenance import Provenance, visible
from betoken.cli.report import TimedCompletion
from betoken.cli.services import missing_packages
from betoken.cli.up import services_config
from betoken.cli.up_options import UpOptions
from betoken.client import Client, Completion, Sampling, Speculation, Token

IDENTITY_MODULE = "betoken.bench.identity"
IDENTITY_NEEDS = (IDENTITY_MODULE, "psutil", "torch", "transformers")
"""The comparison with `transformers` exists only in a checkout."""
PROMPT = '''def merge_sorted(left, right):
    """Merge two sorted lists into one sorted list.

    >>> merge_sorted([1, 4, 9], [2, 3, 10])
    [1, 2, 3, 4, 9, 10]
    >>> merge_sorted([], [5])
    [5]
    """
    result = []
    i = j = 0'''
"""Code that the embedded pair completes; drafts gain about as much as on HumanEval."""


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """The values of the options."""

    target: Annotated[
        str | None, typer.Option(help="Target model: GGUF file, directory or hub id; default: models/target.")
    ] = None
    draft: Annotated[
        str | None, typer.Option(help="Draft model: GGUF file, directory or hub id; default: models/draft.")
    ] = None
    prompt: Annotated[str | None, typer.Option(help="Text to complete; default: the head of a function.")] = None
    drafter: Annotated[str, typer.Option(help="Drafter of the completion with speculation.")] = "fused"
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the completion.")] = 128
    temperature: Annotated[float, typer.Option(min=0.0, help="0 = greedy.")] = 0.0
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32, of both models.")] = "bfloat16"
    repeats: Annotated[int, typer.Option(min=1, help="Timed repeats with and without speculation.")] = 5


@dataclass(frozen=True, slots=True)
class Check:
    """Result of a comparison of tokens."""

    is_equal: bool
    detail: str = ""
    """Explanation of a difference."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """Hardware and versions of the comparison, if it reports them."""


def demo(options: DemoOptions) -> None:
    """Complete a text with and without speculation: sources in colour, both speeds, equal tokens."""
    starting.check_can_start("demo")
    result = Demo(options, Console()).run()
    print(json.dumps(result))
    if not result["identical_to_target"]:
        raise typer.Exit(c.EXIT_FAILED)


class Demo:
    """One run of the demo."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._prompt = PROMPT if options.prompt is None else options.prompt
        self._console = console

    def run(self) -> dict[str, Any]:
        """Show, measure and compare; return the JSON object."""
        with self._client() as client:
            for is_drafted in (True, False):  # warm-up
                self._answer(client, is_drafted)
            self._show(client)
            pairs = [(self._answer(client, True), self._answer(client, False)) for _ in range(self._options.repeats)]
        own = all(drafted.completion.output_ids == plain.completion.output_ids for drafted, plain in pairs)
        checks = {f"own decoding without speculation, {self._options.dtype}": Check(own)}
        if (of_transformers := self._check_against_transformers()) is not None:
            checks["transformers generate(), float32"] = of_transformers
        is_identical = all(check.is_equal for check in checks.values())
        result = {
            "identical_to_target": is_identical,
            "checked_against": {name: check.is_equal for name, check in checks.items()},
            **(_speeds(pairs) if is_identical else {}),
            **_acceptance([drafted.completion for drafted, _ in pairs]),
            "drafter": self._options.drafter,
            "dtype": self._options.dtype,
            "num_new_tokens": len(pairs[0][0].completion.output_ids),
            "repeats": len(pairs),
            **{name: value for check in checks.values() for name, value in check.conditions.items()},
        }
        self._print_result(result, checks)
        return result

    @contextmanager
    def _client(self) -> Iterator[Client]:
        """A client of services that are started for the demo."""
        options = self._options
        local = UpOptions(target=options.target, draft=options.draft, dtype=options.dtype, port=0, no_gateway=True)
        config = replace(services_config(local, self._console), prefix_caching=False)  # the prompt is repeated
        services = starting.started(config, self._console)
        connection = c.Connection(address=services.address)
        try:
            with c.reported_errors(connection, as_json=False), Client(services.address) as client:
                yield client
        finally:
            services.stop()

    def _sampling(self) -> Sampling:
        options = self._options
        return Sampling(
            temperature=options.temperature, top_k=0, top_p=1.0, seed=0, max_new_tokens=options.max_new_tokens
        )

    def _speculation(self, is_drafted: bool) -> Speculation:
        return Speculation(self._options.drafter) if is_drafted else Speculation(off=True)

    def _answer(self, client: Client, is_drafted: bool) -> TimedCompletion:
        start = perf_counter()
        completion = client.complete(self._prompt, sampling=self._sampling(), speculation=self._speculation(is_drafted))
        return TimedCompletion(completion, perf_counter() - start)

    def _show(self, client: Client) -> None:
        """Stream both completions into two columns, tokens coloured by their source."""
        prompt = Text(visible(self._prompt.rstrip("\n")), "dim")
        shown = Provenance(self._console, client.model_info().sources)
        self._console.print(Text("prompt", "bold"), prompt, sep="\n", end="\n\n")
        columns = {"with speculation": Text(), "without": Text()}
        tokens: list[Token] = []
        with Live(_side_by_side(columns), console=self._console, auto_refresh=False) as live:
            for column, is_drafted in zip(columns.values(), (True, False), strict=True):
                answer = client.generate(
                    self._prompt, sampling=self._sampling(), speculation=self._speculation(is_drafted)
                )
                for piece in answer:
                    for token in piece.tokens:
                        column.append(visible(token.text), shown.style(token.provenance))
                    live.update(_side_by_side(columns), refresh=True)
                tokens += answer.result().tokens if is_drafted else ()
        self._console.print()
        self._console.print(shown.legend(tokens))

    def _check_against_transformers(self) -> Check | None:
        """Compare float32 greedy speculation with `generate()`; None outside a checkout."""
        if missing := missing_packages(IDENTITY_NEEDS):
            self._console.print(f"not compared with transformers: needs {', '.join(missing)}", soft_wrap=True)
            return None
        options = self._options
        target, draft = up_checks.models(options.target, options.draft)
        with (
            self._console.status("comparing with generate() of transformers"),
            tempfile.TemporaryDirectory() as folder,
        ):
            prompts = Path(folder, "prompt.jsonl")
            prompts.write_text(json.dumps({"prompt": self._prompt}) + "\n", encoding="utf-8")
            values = {"target": target, "draft": draft, "prompts": prompts, "out": Path(folder, "out")}
            values |= {"max-new-tokens": options.max_new_tokens, "compile": "off"}
            values |= {"cells": f"float32-t0-{options.drafter}-k4-c1"}
            arguments = [part for name, value in values.items() for part in (f"--{name}", str(value))]
            done = subprocess.run(
                [sys.executable, "-m", IDENTITY_MODULE, *arguments], capture_output=True, text=True, check=False
            )
        return _identity(done.stdout, done.stderr)

    def _print_result(self, result: dict[str, Any], checks: dict[str, Check]) -> None:
        for name, check in checks.items():
            self._console.print(f"{'equal to' if check.is_equal else 'DIFFERS from'} {name}")
            if check.detail:
                self._console.print(check.detail, markup=False, soft_wrap=True)
        if not result["identical_to_target"]:
            self._console.print("identity failed: no speeds")
            return
        faster = result["tokens_per_s"] / result["autoregressive_tokens_per_s"]
        self._console.print(
            f"{result['tokens_per_s']} tokens/s with speculation, {result['autoregressive_tokens_per_s']} without "
            f"({faster:.2f} x); {result['block_efficiency']} tokens per target forward, "
            f"{result['acceptance_rate']:.0%} of the guesses accepted"
        )


def _identity(output: str, errors: str) -> Check:
    """The result of the identity benchmark, from its last line."""
    try:
        summary = json.loads(output.splitlines()[-1])
        is_equal = bool(summary["compared"]) and not summary["failed"]
    except (IndexError, ValueError, TypeError, KeyError):
        return Check(False, f"the comparison did not finish: {errors.strip() or output.strip()}")
    conditions = {name: summary[name] for name in ("hardware", "versions") if name in summary}
    return Check(is_equal, "" if is_equal else output.strip(), conditions)


def _acceptance(completions: Sequence[Completion]) -> dict[str, float]:
    """Ratios of sums over the statistics of all completions."""
    stats = [completion.speculation for completion in completions]
    num_forwards = sum(each.num_verify_forwards for each in stats)
    num_drafted = sum(each.num_draft_tokens for each in stats)
    return {
        "block_efficiency": round(sum(each.num_emitted_tokens for each in stats) / max(1, num_forwards), 3),
        "acceptance_rate": round(sum(each.num_accepted_tokens for each in stats) / max(1, num_drafted), 3),
    }


def _speeds(pairs: Sequence[tuple[TimedCompletion, TimedCompletion]]) -> dict[str, float]:
    """Median tokens per second with speculation and without."""
    return {
        "tokens_per_s": round(median(drafted.tokens_per_s for drafted, _ in pairs), 1),
        "autoregressive_tokens_per_s": round(median(plain.tokens_per_s for _, plain in pairs), 1),
    }


def _side_by_side(columns: dict[str, Text]) -> Table:
    table = Table(*columns, expand=True)
    table.add_row(*columns.values())
    return table
