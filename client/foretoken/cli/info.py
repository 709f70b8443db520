"""`foretoken info`: what a router serves, and how its workers are.

Knows the client and how to show what it gives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from foretoken.cli import connection as c
from foretoken.client import ModelInfo, Sampling, WorkerStatus

_STATE_STYLES = {"ready": "green", "connecting": "yellow", "draining": "yellow", "refused": "red"}


def info(
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    address: c.Address = c.DEFAULT_ADDRESS,
    tls: c.TlsFlag = False,
    tls_ca_file: c.TlsCaFile = None,
    tls_cert_file: c.TlsCertFile = None,
    tls_key_file: c.TlsKeyFile = None,
    tls_server_name: c.TlsServerName = "",
    timeout_s: c.TimeoutS = 10.0,
) -> None:
    """Show the served model, its defaults and its workers."""
    connection = c.Connection(address, tls, tls_ca_file, tls_cert_file, tls_key_file, tls_server_name, timeout_s)
    with c.reported_errors(connection, json_), connection.client() as client:
        model = client.model_info()
        if json_:
            print(json.dumps(asdict(model)))
            return
        console = Console()
        console.print(_model_table(model))
        console.print()
        console.print(_worker_table((*model.verify_workers, *model.draft_workers)))


def _model_table(model: ModelInfo) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("model", model.model)
    grid.add_row("vocabulary", f"{model.vocab_size} ids, EOS {', '.join(map(str, model.eos_token_ids)) or 'none'}")
    grid.add_row("context", f"{model.max_context} tokens")
    grid.add_row("chat template", "yes" if model.has_chat_template else "no")
    grid.add_row("drafters", ", ".join(model.drafters) or "none")
    if model.default_drafter:
        grid.add_row("default", f"{model.default_drafter}, {model.default_num_draft_tokens} draft tokens a round")
    grid.add_row("modes", ", ".join(model.verification_modes))
    grid.add_row("sampling", _sampling(model.default_sampling))
    grid.add_row("router", model.version)
    return grid


def _worker_table(workers: Sequence[WorkerStatus]) -> Table:
    table = Table("role", "address", "state", "model", "dtype", "running", "waiting", "free pages", "1 row", "8 rows")
    for worker in workers:
        state = f"[{_STATE_STYLES.get(worker.state, 'white')}]{worker.state}[/]"
        times = {cost.rows: f"{cost.time_s * 1e3:.1f} ms" for cost in worker.step_costs}
        table.add_row(
            worker.role,
            worker.address,
            f"{state}: {worker.detail}" if worker.detail else state,
            worker.model_id or ", ".join(worker.drafters),
            worker.dtype,
            str(worker.running),
            str(worker.waiting),
            f"{worker.free_pages}/{worker.total_pages}",
            times.get(1, ""),
            times.get(8, ""),
        )
    return table


def _sampling(sampling: Sampling) -> str:
    values = ((field.name, getattr(sampling, field.name)) for field in fields(sampling))
    return ", ".join(f"{name} {value:g}" for name, value in values if isinstance(value, int | float)) or "neutral"
