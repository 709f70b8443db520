"""`betoken doctor`: checks of this machine before a model is loaded, each finding with its cure.

The checks are the verify worker's, in a separate process; this module shows their findings.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from betoken.cli.connection import EXIT_FAILED, let_go_of_output
from betoken.cli.service_process import service_environment
from betoken.cli.services import check_installed
from betoken.common.logs import escaped

DOCTOR_MODULE = "betoken.verify_worker.doctor"
DOCTOR_NEEDS = (DOCTOR_MODULE,)
"""Other packages are checked by the command itself."""
_DTYPES = ("bfloat16", "float16", "float32", "auto")
_MAX_PORT = 65535
_STYLES = {"ok": "green", "warning": "yellow", "error": "red"}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The values of the options."""

    model: Annotated[str | None, typer.Option(help="Target: a directory in Hugging Face format or a GGUF file.")] = None
    draft: Annotated[str | None, typer.Option(help="Draft model, likewise.")] = None
    tensor_parallel: Annotated[int, typer.Option(min=1, max=64, help="Processes that share the target.")] = 1
    pipeline: Annotated[int, typer.Option(min=1, max=64, help="Stages of --tensor-parallel processes each.")] = 1
    local_ranks: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Processes of the target on this machine; default: all.")
    ] = None
    rendezvous: Annotated[
        str | None, typer.Option(help="HOST:PORT at which processes of several machines will meet.")
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Torch device of rank 0, e.g. cpu or cuda:0; default: the first GPU, or cpu.")
    ] = None
    dtype: Annotated[str, typer.Option(help="Type of dense weights: bfloat16, float16, float32, auto.")] = "bfloat16"
    kv_memory_bytes: Annotated[int, typer.Option(min=1 << 20, help="KV memory of each rank on a CPU, bytes.")] = 1 << 30
    host: Annotated[str, typer.Option(help="Address that services will listen on.")] = "127.0.0.1"
    ports: Annotated[str, typer.Option(help="Ports that services will listen on, comma-separated; empty = none.")] = (
        "50051,8000"
    )
    cache_dir: Annotated[Path | None, typer.Option(help="Folder for compiled code, as for the workers.")] = None
    timeout_s: Annotated[float, typer.Option(min=1, max=3600, help="Longest time of an exchange, seconds.")] = 60.0
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


def doctor(options: DoctorOptions) -> None:
    """Check this machine before a model is loaded: versions, devices, memory, ports, and the exchange between ranks.

    Each finding has its cure. Exits with status 1 if there is an error; warnings cost speed or may prevent a start.
    """
    values = asdict(options) | {
        "ports": _ports(options.ports),
        "rendezvous": _rendezvous(options.rendezvous),
        "cache_dir": options.cache_dir and str(options.cache_dir),
    }
    as_json = values.pop("json_")
    if options.dtype not in _DTYPES:
        raise typer.BadParameter(f"{options.dtype!r} is not one of {', '.join(_DTYPES)}", param_hint="--dtype")
    if options.device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", options.device):
        raise typer.BadParameter(f"{options.device!r} is not cpu, cuda or cuda:NUMBER", param_hint="--device")
    num_ranks = options.tensor_parallel * options.pipeline
    if num_ranks % (options.local_ranks or 1):
        limit = f"{options.local_ranks} does not divide {num_ranks}, --tensor-parallel times --pipeline"
        raise typer.BadParameter(limit, param_hint="--local-ranks")
    check_installed("doctor", extra="worker", needs=DOCTOR_NEEDS)
    found = _findings(values)
    has_error = any(finding["level"] == "error" for finding in found)
    try:
        if as_json:
            print(json.dumps({"ok": not has_error, "findings": found}))
        else:
            _show(found)
    finally:
        let_go_of_output()
    if has_error:
        raise typer.Exit(EXIT_FAILED)


def _ports(text: str) -> list[int]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if bad := [name for name in names if not (name.isdecimal() and 1 <= int(name) <= _MAX_PORT)]:
        raise typer.BadParameter(f"{bad[0]!r} is not a port from 1 to {_MAX_PORT}", param_hint="--ports")
    return [int(name) for name in names]


def _rendezvous(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not host or not (port.isdecimal() and 1 <= int(port) <= _MAX_PORT):
        raise typer.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--rendezvous")
    return host, int(port)


def _findings(values: dict[str, Any]) -> list[dict[str, str]]:
    """Raises:
    typer.Exit: the checks ended without findings; their own words are on standard error.
    """
    command = [sys.executable, "-m", DOCTOR_MODULE, json.dumps(values)]
    done = subprocess.run(command, env=service_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        found: list[dict[str, str]] = json.loads(done.stdout)
    except ValueError:
        sys.stderr.write(f"betoken: the checks ended with status {done.returncode}\n")
        raise typer.Exit(EXIT_FAILED) from None
    return found


def _show(found: list[dict[str, str]]) -> None:
    table = Table("check", "level", "found", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    for finding in found:
        level = finding["level"]
        text = Text(escaped(finding["found"]), overflow="fold")
        if finding["cure"]:
            text.append(f"\ncure: {escaped(finding['cure'])}", style="dim")
        table.add_row(Text(finding["name"]), Text(level, style=_STYLES[level]), text)
    console = Console()
    console.print(table)
    counts = {level: sum(finding["level"] == level for finding in found) for level in ("error", "warning")}
    console.print(", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items()))
