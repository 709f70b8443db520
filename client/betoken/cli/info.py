"""`betoken info`: what a router serves, and how its workers are.

Knows the client and how to show what it gives.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from betoken.cli import connection as c
from betoken.client import ModelInfo, Sampling, SpeculationPolicy, WorkerStatus
from betoken.common.logs import escaped

_WIDTH_OF_A_PIPE = 160
_LEAST_WIDTH = 80
"""A narrower terminal breaks the lines itself: rich would cut numbers short, which makes others of them."""
_FOLDED = {"address": 15, "model": 8}
"""Columns that may go on in a next line, and the width they keep; names and numbers stay whole."""
_STATE_STYLES = {"ready": "green", "loading": "yellow", "connecting": "yellow", "draining": "yellow", "refused": "red"}


@dataclass(frozen=True, kw_only=True)
class InfoOptions(c.Connection):
    """The values of the options."""

    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False
    timeout_s: Annotated[float, c.TIMEOUT_S] = 10.0


def info(options: InfoOptions) -> None:
    """Show the served model, its defaults and its workers."""
    with c.reported_errors(options, options.json_), options.client() as client:
        model = client.model_info(wait=False)  # it is asked most where workers are not ready
        if options.json_:
            print(json.dumps(asdict(model)))
            return
        console = _console()
        console.print(_model_table(model))
        console.print()
        workers = (*model.verify_workers, *model.draft_workers)
        console.print(_worker_table(workers))
        for worker in workers:
            if worker.detail:
                done = f" ({worker.loading_fraction:.0%})" if worker.state == "loading" else ""
                told = escaped(f"{worker.address} is {worker.state}: {worker.detail}{done}")
                console.print(told, markup=False, highlight=False)


def _console() -> Console:
    console = Console()
    console.width = max(console.width, _LEAST_WIDTH) if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    return console


def _model_table(model: ModelInfo) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    if not model.model:
        grid.add_row("model", escaped(str(model.loading or "none: no verify worker has been met yet")))
        grid.add_row("drafters", _drafters(model))
        grid.add_row("router", model.version)
        return grid
    grid.add_row("model", Text(escaped(model.model)))  # names are not markup, even with brackets
    grid.add_row("vocabulary", f"{model.vocab_size} ids, EOS {', '.join(map(str, model.eos_token_ids)) or 'none'}")
    grid.add_row("context", f"{model.max_context} tokens")
    if memory := _memory(model.verify_workers):
        grid.add_row("memory", memory)
    if memory := _memory(model.draft_workers):
        grid.add_row("draft memory", memory)
    if texts := _earlier_texts((*model.verify_workers, *model.draft_workers)):
        grid.add_row("earlier texts", texts)
    grid.add_row("chat template", "yes" if model.has_chat_template else "no")
    grid.add_row("fill-in-the-middle", "yes" if model.supports_infill else "no")
    grid.add_row("drafters", _drafters(model))
    if model.default_drafter:
        number = model.default_num_draft_tokens or "adaptive"
        grid.add_row("default", f"{model.default_drafter}, draft tokens a round: {number}")
    masks = {worker.mask_token_id for worker in model.draft_workers if worker.mask_token_id is not None}
    if masks:
        told = ", ".join(map(str, sorted(masks)))
        grid.add_row("parallel drafts", f"PARD, one forward per draft, mask token {told}")
    for translation in {worker.translation for worker in model.draft_workers if worker.translation is not None}:
        how = "token by token (TLI)" if translation.is_by_token else "as text (SLEM)"
        grid.add_row("translated drafts", f"{how}, {translation.coverage:.0%} of the target's tokens are common")
    if model.num_overlap_outcomes:
        grid.add_row("overlapped rounds", f"draft ahead for {model.num_overlap_outcomes} outcomes")
    for policy in model.speculation_policies:
        grid.add_row("speculation", escaped(f"{_kind(policy)}, {policy.reason}"))
    grid.add_row("modes", ", ".join(model.verification_modes))
    grid.add_row("sampling", _sampling(model.default_sampling))
    grid.add_row("fingerprint", model.system_fingerprint)
    grid.add_row("router", model.version)
    return grid


def _kind(policy: SpeculationPolicy) -> str:
    """The requests that a policy decides for, in words."""
    place = " (attached)" if policy.is_attached else ""
    prediction = ", with a prediction" if policy.has_prediction else ""
    return f"{policy.drafter}{place}, {'sampled' if policy.is_sampled else 'greedy'}{prediction}"


def _drafters(model: ModelInfo) -> str:
    """Names on offer; which of them verify workers run themselves."""
    attached = {name for worker in model.verify_workers for name in worker.drafters}
    names = (f"{name} (attached)" if name in attached else name for name in model.drafters)
    return escaped(", ".join(names)) or "none"


def _memory(workers: Sequence[WorkerStatus]) -> str:
    """Memory of a worker by kind; empty if none reports it."""
    told = [worker for worker in workers if worker.weight_bytes]
    if not told:
        return ""
    kinds = {"weights": told[0].weight_bytes, "KV pages": told[0].kv_bytes, "other": told[0].other_bytes}
    known = ", ".join(f"{kind} {num_bytes / 1e6:.1f} MB" for kind, num_bytes in kinds.items() if num_bytes)
    states = told[0].sequence_state_bytes
    beside = f", states of an open sequence {states / 1e6:.1f} MB" if states else ""
    if limit := told[0].snapshot_limit_bytes:
        held = "/".join(f"{worker.snapshot_bytes / 1e6:.1f}" for worker in told)
        beside += f", snapshots of states {held} of at most {limit / 1e6:.1f} MB"
    return f"{known}{beside}"


def _earlier_texts(workers: Sequence[WorkerStatus]) -> str:
    """Size and use of the memories of all workers; empty if they hold nothing."""
    num_documents = sum(worker.memory_documents for worker in workers)
    num_tokens = sum(worker.memory_tokens for worker in workers)
    num_hits = sum(worker.memory_hits for worker in workers)
    return f"{num_documents} of {num_tokens} tokens, {num_hits} drafts from them" if num_documents else ""


def _worker_table(workers: Sequence[WorkerStatus]) -> Table:
    headers = ("worker", "address", "state", "model", "running", "free\npages", "ms per\n1, 8 rows")
    table = Table(*headers, box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    for column in table.columns:
        column.overflow = "fold"
        column.no_wrap = column.header not in _FOLDED
        column.min_width = _FOLDED.get(str(column.header))
    for worker in workers:
        state = f"[{_STATE_STYLES.get(worker.state, 'none')}]{worker.state}[/]"
        if worker.pipeline_parallel_degree > 1:
            state += f", {worker.pipeline_parallel_degree} stages"
        if worker.tensor_parallel_degree > 1:
            state += f", {worker.tensor_parallel_degree} ranks"
        if worker.is_synthetic:
            state += ", synthetic"
        times = [f"{cost.time_s * 1e3:.1f}" for cost in worker.step_costs if cost.rows in (1, 8)]
        table.add_row(
            worker.role,
            Text(worker.address),
            state,
            Text(escaped(" ".join((Path(worker.model_id).name, worker.dtype)).strip() or ", ".join(worker.drafters))),
            f"{worker.running} (+{worker.waiting})" if worker.waiting else str(worker.running),
            f"{worker.free_pages}/{worker.total_pages}",
            ", ".join(times),
        )
    return table


def _sampling(sampling: Sampling) -> str:
    values = ((field.name, getattr(sampling, field.name)) for field in fields(sampling))
    numbers = [(name, value) for name, value in values if isinstance(value, int | float) and value is not False]
    return ", ".join(f"{name} {value:g}" for name, value in numbers) or "neutral"
