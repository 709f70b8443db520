"""`betoken bench`: load tests of a served endpoint, ours or another that speaks OpenAI's protocol.

The measuring is `betoken.loadtest`'s; this is its command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from betoken.cli.connection import PANEL, read_key, reported_errors
from betoken.client import InvalidArgumentError, UnavailableError
from betoken.common.api_key import API_KEY_VARIABLE
from betoken.loadtest.acceptance import Acceptance, of_metrics
from betoken.loadtest.endpoint import Endpoint, RequestFailedError, Served
from betoken.loadtest.load import run_closed, run_open
from betoken.loadtest.plots import check_plotting, write_plots
from betoken.loadtest.prompts import Prompt, load_prompts
from betoken.loadtest.record import Record, RequestOptions, ask
from betoken.loadtest.report import Load, parse_limits, report

_LATENCIES = (
    ("first token", "ttft_ms"),
    ("per token", "tpot_ms"),
    ("between chunks", "itl_ms"),
    ("end to end", "e2el_ms"),
)


class Api(StrEnum):
    """The API that prompts are sent to."""

    AUTO = "auto"
    CHAT = "chat"
    COMPLETIONS = "completions"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The values of the options."""

    goodput_limits: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME:MS]...", help="Further limits of --goodput.")
    ] = None
    prompts: Annotated[
        Path,
        typer.Option(help="File (.jsonl, .jsonl.gz) of `prompt`, `turns` or `messages`, or a folder of such files."),
    ]
    url: Annotated[str, typer.Option(help="The endpoint.", rich_help_panel=PANEL)] = "http://127.0.0.1:8000"
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the API key; absent = the one in {API_KEY_VARIABLE}.", rich_help_panel=PANEL),
    ] = None
    timeout_s: Annotated[
        float, typer.Option(min=0.001, help="Longest wait for the next bytes, seconds.", rich_help_panel=PANEL)
    ] = 600.0
    model: Annotated[str, typer.Option(help="Served model; absent = the first.")] = ""
    api: Annotated[Api, typer.Option(help="auto = chat for prompts of conversations.")] = Api.AUTO
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Closed loop: number of streams; repeatable. Default: 1.")
    ] = None
    request_rate: Annotated[
        list[float] | None, typer.Option(help="Open loop: requests per second, Poisson arrivals; repeatable.")
    ] = None
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests per load; beyond the file's prompts, they repeat.")
    ] = None
    num_warmups: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 1
    max_tokens: Annotated[int, typer.Option(min=1, help="Most output tokens of a request.")] = 128
    temperature: Annotated[float | None, typer.Option(min=0, help="Absent = the server's default.")] = None
    seed: Annotated[int, typer.Option(help="Seed of the requests and of the arrivals.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers end at --max-tokens only.")] = False
    body: Annotated[str, typer.Option(metavar="JSON", help="Object of further fields of each request.")] = "{}"
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Limits that count a request as good: ttft, tpot, e2el in ms, such as ttft:500 tpot:50.",
        ),
    ] = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")] = None
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots as PNG files.")] = None
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


def bench(options: BenchOptions) -> None:
    """Measure latency, throughput, goodput and acceptance of a served endpoint under load."""
    with reported_errors(None, options.json_):
        results = run(options, announce=lambda text: sys.stderr.write(f"{text}\n"))
        text = json.dumps(results)
        if options.out is not None:
            options.out.write_text(f"{text}\n")
        if options.json_:
            print(text)
            return
        console = Console()
        for name, table in (("latency, ms", _latencies(results["runs"])), ("throughput", _throughput(results["runs"]))):
            console.print(f"\n{name}" if name == "throughput" else name, style="bold")
            console.print(table)
        for path in results["plots"]:
            console.print(path, highlight=False)


def run(options: BenchOptions, announce: Any) -> dict[str, Any]:
    """Return the results of all loads, of JSON types only.

    Raises:
        BetokenError: a value cannot be used, the server cannot be reached, or no request of a load was answered.
    """
    limits, loads, prompts = (
        parse_limits([*(options.goodput or ()), *(options.goodput_limits or ())]),
        _loads(options),
        prompts_of(options.prompts, options.num_prompts),
    )
    fields = _fields(options)
    if options.plot is not None:
        check_plotting()
    key = os.environ.get(API_KEY_VARIABLE, "") if options.api_key_file is None else read_key(options.api_key_file)
    endpoint = Endpoint(options.url, key, options.timeout_s)
    served = endpoint.served(options.model)
    is_chat = None if options.api is Api.AUTO else options.api is Api.CHAT
    request = RequestOptions(served.model, options.max_tokens, is_chat, fields)
    run_closed(list(islice(cycle(prompts), options.num_warmups)), partial(ask, endpoint, request), 1)
    runs = []
    for load in loads:
        announce(f"{load}: {len(prompts)} requests")
        runs.append(_measured(endpoint, request, load, prompts, limits, options.seed))
    traced = _traced(endpoint, request, served, prompts[0]) if options.plot is not None else None
    plots = write_plots(options.plot, runs, traced) if options.plot is not None else []
    settings = {
        "url": options.url,
        "model": served.model,
        "prompts": str(options.prompts),
        "max_tokens": options.max_tokens,
    }
    return settings | {"seed": options.seed, "fields": fields, "runs": runs, "plots": [str(path) for path in plots]}


def _measured(
    endpoint: Endpoint,
    request: RequestOptions,
    load: Load,
    prompts: Sequence[Prompt],
    limits: Mapping[str, float],
    seed: int,
) -> dict[str, Any]:
    before = _counted(endpoint)
    if load.concurrency is not None:
        records = run_closed(prompts, partial(ask, endpoint, request), load.concurrency)
    else:
        assert load.request_rate is not None
        records = run_open(prompts, partial(ask, endpoint, request), load.request_rate, seed)
    if all(record.error for record in records):
        raise UnavailableError(f"all {len(records)} requests failed, the first with: {records[0].error}")
    after = _counted(endpoint)
    counted = after - before if before is not None and after is not None else None
    return report(load, records, limits, counted)


def _counted(endpoint: Endpoint) -> Acceptance | None:
    """The server's counters of drafts so far; None if it has none."""
    try:
        return of_metrics(endpoint.text("/metrics"))
    except RequestFailedError:
        return None


def _traced(endpoint: Endpoint, request: RequestOptions, served: Served, prompt: Prompt) -> Record:
    """One generation alone, with its rounds if the server is our gateway."""
    body = dict(request.fields)
    if served.is_betoken:
        body["betoken"] = {**body.get("betoken", {}), "rounds": True}
    traced = RequestOptions(request.model, request.max_tokens, request.is_chat, body)
    (record,) = run_closed([prompt], partial(ask, endpoint, traced), 1)
    return record


def _loads(options: BenchOptions) -> list[Load]:
    for name, values in (("concurrency", options.concurrency), ("request_rate", options.request_rate)):
        for value in values or ():
            if not 0 < value <= 1e6:
                raise InvalidArgumentError(name, value, "must be above 0, at most 1000000")
    streams = options.concurrency or ([] if options.request_rate else [1])
    return [
        *(Load(concurrency=one) for one in streams),
        *(Load(request_rate=one) for one in options.request_rate or ()),
    ]


def prompts_of(path: Path, num: int | None) -> list[Prompt]:
    """Return `num` prompts of a file or folder, repeated if it holds fewer; all of them when None.

    Raises:
        InvalidArgumentError: it cannot be read, or is not a file of prompts.
    """
    try:
        prompts = load_prompts(path, num)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InvalidArgumentError("prompts", str(path), f"cannot be used, {reason}") from None
    return list(islice(cycle(prompts), num or len(prompts)))


def _fields(options: BenchOptions) -> dict[str, Any]:
    try:
        fields = json.loads(options.body)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidArgumentError("body", options.body, "must be a JSON object")
    own: dict[str, Any] = {"seed": options.seed}
    if options.temperature is not None:
        own["temperature"] = options.temperature
    if options.ignore_eos:
        own["ignore_eos"] = True
    return own | fields


def _load_name(run: Mapping[str, Any]) -> str:
    return str(Load(**run["load"]))


def _latencies(runs: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for header in ("load", "latency", "mean", "p50", "p95", "p99"):
        table.add_column(header, justify="left" if header in ("load", "latency") else "right")
    for one in runs:
        for name, key in _LATENCIES:
            if values := one[key]:
                table.add_row(_load_name(one), name, *(f"{value:.1f}" for value in values.values()))
    return table


def _throughput(runs: Iterable[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    headers = (
        "load",
        "requests",
        "failed",
        "requests/s",
        "output tokens/s",
        "goodput/s",
        "tokens per round",
        "acceptance",
    )
    for header in headers:
        table.add_column(header, justify="left" if header == "load" else "right")
    for one in runs:
        goodput, accepted = one["goodput"], one["acceptance"]
        table.add_row(
            _load_name(one),
            str(one["num_requests"]),
            str(one["num_failed"]),
            f"{one['requests_per_s']:.2f}",
            f"{one['output_tokens_per_s']:.1f}",
            f"{goodput['requests_per_s']:.2f}" if goodput else "–",
            f"{accepted['mean_acceptance_length']:.2f}" if accepted else "–",
            f"{accepted['acceptance_rate']:.0%}" if accepted else "–",
        )
    return table
