"""Starts and stops local services for a command, with progress and errors on the terminal.

`local_services` manages the processes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

import rich.progress
import typer
from rich.console import Console

from betoken.cli import services as service_commands
from betoken.cli.connection import EXIT_FAILED, in_options
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.service_process import Progress, ServiceFailedError
from betoken.client import BetokenError


class ProgressView(Protocol):
    """Shows how far a service's start is."""

    def __call__(self, name: str, progress: Progress) -> None: ...


def check_can_start(command: str) -> None:
    """Check that the packages of a router and of workers with a model are installed.

    Raises:
        typer.Exit: one is missing.
    """
    needs = tuple(dict.fromkeys((*service_commands.ROUTER_NEEDS, *service_commands.WORKER_NEEDS)))
    service_commands.check_installed(command, extra="router,worker", needs=needs)


def started(config: LocalServicesConfig, console: Console) -> LocalServices:
    """Start all services and show their progress.

    Raises:
        typer.Exit: one failed, or the start was interrupted.
    """
    try:
        with shown_progress(console) as view:
            services = LocalServices(config, view)
            try:
                services.start()
            except KeyboardInterrupt:
                stop_at_once(services)  # again: interrupted twice, it has not stopped all
                raise
    except (ServiceFailedError, BetokenError, OSError) as error:
        complain(console, error)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        console.print("stopped before all services were up")
        raise typer.Exit(EXIT_FAILED) from None
    return services


@contextmanager
def shown_progress(console: Console) -> Iterator[ProgressView]:
    """A view of starting services: bars on a terminal, a line per change elsewhere."""
    if not console.is_terminal:
        lines: dict[str, str] = {}

        def show_line(name: str, progress: Progress) -> None:
            line = f"{name}: {progress.stage} ({progress.fraction:.0%})"
            if lines.get(name) != line:
                lines[name] = line
                console.print(line, markup=False)

        yield show_line
        return
    columns = (
        rich.progress.SpinnerColumn(finished_text="[green]✓[/]"),
        rich.progress.TextColumn("{task.fields[service]}"),
        rich.progress.BarColumn(bar_width=24),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("[dim]{task.description}[/]"),
    )
    with rich.progress.Progress(*columns, console=console) as bars:
        tasks: dict[str, rich.progress.TaskID] = {}

        def view(name: str, progress: Progress) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task("", total=1.0, service=name)
            bars.update(tasks[name], completed=progress.fraction, description=progress.stage)

        yield view


def complain(console: Console, error: Exception) -> None:
    """Lines of a log stay whole, so that they can be searched for."""
    text = in_options(error, "--router-") if isinstance(error, BetokenError) else error
    console.print(f"betoken: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def stop(services: LocalServices, console: Console) -> None:
    """In order; at once when interrupted again."""
    try:
        with suppress(OSError, SystemExit):  # whoever read it may be gone: a terminal, a `tee` of that Ctrl-C
            console.print("stopping; interrupt again to stop at once")
        services.stop()
    except KeyboardInterrupt:
        stop_at_once(services)


def stop_at_once(services: LocalServices) -> None:
    """This takes no time, and interrupted it would leave processes and a folder behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    services.stop(grace_s=0.0)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
