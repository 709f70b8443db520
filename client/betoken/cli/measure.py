"""`betoken measure`: the values of `betoken plan` from running workers, and its prediction next to the measurement.

Knows the client; the arithmetic is `measured`'s.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from betoken.cli import connection as c
from betoken.cli.bench import prompts_of
from betoken.cli.measured import Measured, measured, shared_probability, table_ratio
from betoken.cli.plan import as_json, summary, table
from betoken.client import (
    Client,
    Completion,
    InvalidArgumentError,
    ModelInfo,
    Sampling,
    Speculation,
    UnavailableError,
    VerificationMode,
)
from betoken.common.economy.plan import DraftKind, plan
from betoken.loadtest.prompts import Prompt

_MODEL = "model"
"""Drafter that reports its probabilities."""


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(c.Connection):
    """The values of the options."""

    prompts: Annotated[Path, typer.Option(help="Prompts, as for `betoken bench`.")]
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts used; each is answered twice.")] = 8
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Most tokens of an answer.")] = 128
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=512, help="Fixed draft length.")] = 4
    drafter: Annotated[str | None, typer.Option(help="Drafter; absent = the router's default.")] = None
    draft: Annotated[DraftKind, typer.Option(help="Forwards of the drafter: one per token, or one per round.")] = (
        DraftKind.SEQUENTIAL
    )
    hit_rate: Annotated[float, typer.Option(min=0, max=1, help="Assumed unless rounds are overlapped.")] = 0.8
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 0.0
    total_variation: Annotated[
        bool,
        typer.Option(
            "--total-variation",
            help="Also answer each prompt in the mode REJECTION, whose acceptance with `model` is 1 - TV of the pair;"
            " needs a temperature above 0.",
        ),
    ] = False
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


def measure(options: MeasureOptions) -> None:
    """Measure step times, acceptance and hops of running workers; print the plan they give and the measured speed-up.

    One stream answers each prompt without speculation and then with drafts of a fixed length. Other load disturbs it.
    """
    with c.reported_errors(options, options.json_), options.client() as client:
        if options.total_variation and options.temperature == 0:
            raise InvalidArgumentError("temperature", 0, "must be above 0 with --total-variation")
        prompts = prompts_of(options.prompts, options.num_prompts)
        info = client.model_info()
        decoded, drafted = _answers(client, info, options, prompts)
        result = measured(decoded, drafted, options.num_draft_tokens, options.hit_rate, options.draft)
        shared = _shared_probability(client, info, options, prompts) if options.total_variation else None
        planned = plan(result.inputs)
        ratio = _table_ratio(info, options.num_draft_tokens)
        if options.json_:
            told = {"measured": result.as_json(), "table_verify_ratio": ratio, "drafter": drafted[0].drafter}
            told |= {"shared_probability": shared and dict(zip(("mean", "standard_error"), shared, strict=True))}
            print(json.dumps(told | {"plan": as_json(planned)}))
            return
        console = Console()
        comparison = _comparison(result, drafted[0].drafter, ratio)
        if shared is not None:
            comparison.add_row("1 - TV", f"{shared[0]:.3f} ± {shared[1]:.3f} of `{_MODEL}` and the target")
        for grid in (comparison, summary(planned), table(planned)):
            console.print(grid)
            console.print()


def _answers(
    client: Client, info: ModelInfo, options: MeasureOptions, prompts: list[Prompt]
) -> tuple[list[Completion], list[Completion]]:
    """Answers without speculation and with drafts, in turn after one unmeasured pair.

    Raises:
        UnavailableError: tokens differ, so that speeds cannot be compared.
    """
    ways = (Speculation(off=True), Speculation(options.drafter, num_draft_tokens=options.num_draft_tokens))
    pairs = []
    for prompt in (prompts[0], *prompts):
        pair = [_answer(client, info, options, prompt, way) for way in ways]
        if pair[0].output_ids != pair[1].output_ids:
            raise UnavailableError(f"prompt {prompt.index}: tokens with drafts differ from those without")
        pairs.append(pair)
        sys.stderr.write(f"{len(pairs)} of {len(prompts) + 1} prompts\n")
    decoded, drafted = zip(*pairs[1:], strict=True)
    return list(decoded), list(drafted)


def _shared_probability(
    client: Client, info: ModelInfo, options: MeasureOptions, prompts: list[Prompt]
) -> tuple[float, float]:
    way = Speculation(_MODEL, num_draft_tokens=1, mode=VerificationMode.REJECTION)
    return shared_probability([_answer(client, info, options, prompt, way) for prompt in prompts])


def _answer(client: Client, info: ModelInfo, options: MeasureOptions, prompt: Prompt, way: Speculation) -> Completion:
    sampling = Sampling(temperature=options.temperature, seed=0, max_new_tokens=options.max_new_tokens, ignore_eos=True)
    is_chat = prompt.is_chat and info.has_chat_template
    question: Any = [{"role": "user", "content": prompt.text}] if is_chat else prompt.text
    return client.generate(question, sampling=sampling, speculation=way).result()


def _table_ratio(info: ModelInfo, num_draft_tokens: int) -> float | None:
    """Verify forward over decode step by the table that a verify worker measured at its start."""
    ratios = (table_ratio(worker.step_costs, num_draft_tokens + 1) for worker in info.verify_workers)
    return next((ratio for ratio in ratios if ratio is not None), None)


def _comparison(result: Measured, drafter: str, ratio: float | None) -> Table:
    inputs, length = result.inputs, result.num_draft_tokens
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("drafter", f"{drafter}, {length} draft tokens per round")
    grid.add_row("acceptance", f"{inputs.acceptance:.3f}; by position {_listed(result.acceptance_by_position)}")
    if result.is_overlapped:
        grid.add_row("hit rate", f"{inputs.hit_rate:.3f} of overlapped rounds")
    beta = f"{result.verify_ratio:.2f}" + (f"; {ratio:.2f} by the worker's table" if ratio is not None else "")
    grid.add_row("beta", beta)
    grid.add_row("hops", f"{2 * inputs.rtt_ms:.2f} ms per round")
    grid.add_row(
        "tokens per round", f"{result.block_length:.2f} measured, {result.predicted_block_length:.2f} predicted"
    )
    speeds = f"{result.decode_tokens_per_s:.1f} to {result.tokens_per_s:.1f} tokens/s"
    grid.add_row("speed-up", f"{result.speedup:.2f} measured ({speeds}), {result.predicted_speedup:.2f} predicted")
    return grid


def _listed(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)
