"""`betoken up`: gateway, router, draft worker and verify worker as processes of this machine, until Ctrl-C.

Knows how to show their start and their end; starting and stopping is `local_services`' matter.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Protocol

import rich.progress
import typer
from rich.console import Console

from betoken.cli import services as service_commands
from betoken.cli import up_options as options
from betoken.cli.connection import EXIT_FAILED, in_options, let_go_of_output
from betoken.cli.local_services import (
    LocalServices,
    LocalServicesConfig,
)
from betoken.cli.service_process import Progress, ServiceFailedError
from betoken.cli.supervision import Supervisor
from betoken.cli.up_form import UpForm
from betoken.client import BetokenError, ClientTls
from betoken.common.release import how_to_install

_CHECK_INTERVAL_S = 0.25
_EMBEDDED_PROMPT, _PROMPT = "--raw 'def fibonacci(n):'", "'Write a haiku about rivers.'"
"""Examples for the embedded models, which complete code, and for others."""
_STOP_GRACE_S = 3660.0
"""Above the longest `--drain-grace-s`: services end by themselves within their own; interrupted again, at once."""


class ProgressView(Protocol):
    """Shows how far a service's start is."""

    def __call__(self, name: str, progress: Progress) -> None: ...


def up(form: UpForm) -> None:
    """Run all services on this machine until Ctrl-C."""
    needs = tuple(dict.fromkeys((*service_commands.ROUTER_NEEDS, *service_commands.WORKER_NEEDS)))
    service_commands.check_installed("up", extra="router,worker", needs=needs)
    console = Console(stderr=True)
    config = _config(form, console)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _interrupt)  # the terminal was closed
    services = _started(config, console, reports_omitted=form.drafters is None)
    is_interrupted = False
    try:
        _announce(services, _EMBEDDED_PROMPT if form.target is None else _PROMPT)
        _watch(services, console)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        _stop(services, console)
        let_go_of_output()
    if not is_interrupted:
        raise typer.Exit(EXIT_FAILED)


def _config(form: UpForm, console: Console) -> LocalServicesConfig:
    """The services to start, all options checked.

    Raises:
        typer.BadParameter: options that do not fit together, or this machine.
    """
    target, draft = options.models(form.target, form.draft)
    models = options.drafter_models(target, draft, form.weights)
    verify_options = options.split("--verify-options", form.verify_options)
    attached = options.attached(form.attached_drafters, form.drafters, models, verify_options)
    names = options.drafters(form.drafters, models, attached)
    options.check_models_are_used((*names, *attached), models, form.weights, is_draft_named=form.draft is not None)
    named = {"--draft": draft} | {options.flag(name): value for name, value in form.weights.items()}
    options.check_paths({"--target": target} | named)
    router_options = options.split("--router-options", form.router_options)
    options.check_tokenizers(target, named if names else {}, router_options)
    port = options.checked_port(form.host, form.port)
    http_port = None if form.no_gateway else _http_port(form.host, form.http_port, console)
    tls = ClientTls(
        form.router_tls_ca_file, form.router_tls_cert_file, form.router_tls_key_file, form.router_tls_server_name
    )
    return LocalServicesConfig(
        target=target,
        draft=draft,
        weights=form.weights,
        drafters=names,
        attached_drafters=attached,
        dtype=form.dtype,
        verify_threads=form.threads,
        draft_threads=form.draft_threads,
        compile=form.compile,
        num_verify_workers=form.num_verify_workers,
        num_draft_workers=form.num_draft_workers,
        host=form.host,
        port=port,
        verify_options=verify_options,
        draft_options=options.split("--draft-options", form.draft_options),
        router_options=router_options,
        http_port=http_port,
        gateway_options=options.split("--gateway-options", form.gateway_options),
        router_tls=options.router_tls(router_options, tls),
        log_directory=form.log_directory,
        stop_grace_s=_STOP_GRACE_S,
    )


def _started(config: LocalServicesConfig, console: Console, *, reports_omitted: bool) -> LocalServices:
    """All services, up; `reports_omitted`: whether to say which usual drafters are not among them.

    Raises:
        typer.Exit: one failed, or the start was interrupted.
    """
    names = (*(config.drafters or ()), *config.attached_drafters)
    try:
        if reports_omitted and (left_out := options.left_out(names)):
            text = f"betoken: no --draft: without the drafters {', '.join(left_out)}"
            console.print(text, markup=False, soft_wrap=True)
        with shown_progress(console) as view:
            services = LocalServices(config, view)
            try:
                services.start()
            except KeyboardInterrupt:
                _stop_at_once(services)  # again: interrupted twice, it has not stopped all
                raise
    except (ServiceFailedError, BetokenError, OSError) as error:
        _complain(console, error)
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


def _http_port(host: str, port: int | None, console: Console) -> int | None:
    """The gateway's port; None if its packages are missing and it was not requested."""
    needs = service_commands.GATEWAY_NEEDS
    if port is not None:
        service_commands.check_installed("--http-port", extra="gateway", needs=needs)
    elif missing := service_commands.missing_packages(needs):
        text = f"betoken: no gateway: it needs {', '.join(missing)}: {how_to_install('gateway')}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return None
    return options.checked_http_port(host, port)


def _complain(console: Console, error: Exception) -> None:
    """Lines of a log stay whole, so that they can be searched for."""
    text = in_options(error, "--router-") if isinstance(error, BetokenError) else error
    console.print(f"betoken: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def _announce(services: LocalServices, prompt: str) -> None:
    for name, service in services.services.items():
        sys.stderr.write(f"{name:9} {service.address}  pid {service.pid}\n")
    for remark in services.remarks:
        sys.stderr.write(f"{remark}\n")
    options = ["--address", services.address]
    if (tls := services.config.router_tls) is not None:
        files = {"ca-file": tls.ca_file, "cert-file": tls.cert_file, "key-file": tls.key_file}
        named = files | {"server-name": tls.server_name}
        options += [part for name, value in named.items() if value for part in (f"--tls-{name}", str(value))]
    sys.stderr.write(f"try: betoken generate {shlex.join(options)} {prompt}\n")
    if (gateway := services.services.get("gateway")) is not None:
        is_https = any(option.partition("=")[0] == "--tls-cert-file" for option in services.config.gateway_options)
        sys.stderr.write(f"open: http{'s' * is_https}://{gateway.address}  (OpenAI's protocol under /v1)\n")
    sys.stderr.write("Ctrl-C stops all\n")
    print(services.address, flush=True)


def _watch(services: LocalServices, console: Console) -> None:
    """Returns when a service has ended for good that the others cannot do without."""

    def report(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    supervisor = Supervisor(services.services, report, lambda error: _complain(console, error))
    while supervisor.step():
        time.sleep(_CHECK_INTERVAL_S)


def _stop(services: LocalServices, console: Console) -> None:
    """In order; at once when interrupted again."""
    try:
        with suppress(OSError, SystemExit):  # whoever read it may be gone: a terminal, a `tee` of that Ctrl-C
            console.print("stopping; interrupt again to stop at once")
        services.stop()
    except KeyboardInterrupt:
        _stop_at_once(services)


def _stop_at_once(services: LocalServices) -> None:
    """This takes no time, and interrupted it would leave processes and a folder behind."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    services.stop(grace_s=0.0)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
