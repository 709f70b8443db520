"""`betoken up`: router, draft worker and verify worker as processes of this machine, until Ctrl-C.

Knows how to show their start and their end; starting and stopping is `local_services`' matter.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Protocol

import rich.progress
import typer
from rich.console import Console

from betoken.cli import services as service_commands
from betoken.cli.connection import EXIT_FAILED, let_go_of_output
from betoken.cli.local_services import LocalServices, LocalServicesConfig, embedded_models
from betoken.cli.service_process import Progress, ServiceFailedError
from betoken.client import BetokenError, ClientTls
from betoken.common.address import is_socket

_CHECK_INTERVAL_S = 0.25
_DEFAULT_PORT = 50051
_STOP_GRACE_S = 3660.0
"""Above the longest `--drain-grace-s`: services end by themselves within their own; interrupted again, at once."""
_WORKERS = "Workers"
_TLS = "How to reach a router that speaks TLS"


class ProgressView(Protocol):
    """Shows how far a service's start is."""

    def __call__(self, name: str, progress: Progress) -> None: ...


def up(
    target: Annotated[
        str | None, typer.Option(help="Target model: directory or hub id; default: models/target.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model, likewise; default: models/draft where no target is named, else none."),
    ] = None,
    lookahead_model: Annotated[
        str, typer.Option(help="What the drafter `lookahead` iterates; default: the draft model, else the target.")
    ] = "",
    drafters: Annotated[
        str, typer.Option(help="Hosted drafters, the default first; empty = none.")
    ] = "fused,model,ngram,staged",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto.")] = "bfloat16",
    compile: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    host: Annotated[
        str, typer.Option(help="Address the router listens on; 0.0.0.0 or :: for all; unix:/PATH = a socket.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the router; 0 = any free one; default: 50051.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of a verify worker.", rich_help_panel=_WORKERS)
    ] = None,
    draft_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of a draft worker.", rich_help_panel=_WORKERS)
    ] = 1,
    num_verify_workers: Annotated[int, typer.Option(min=1, rich_help_panel=_WORKERS)] = 1,
    num_draft_workers: Annotated[int, typer.Option(min=0, rich_help_panel=_WORKERS)] = 1,
    verify_options: Annotated[
        str, typer.Option(help="More options of the verify workers, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    draft_options: Annotated[
        str, typer.Option(help="More options of the draft workers, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    router_options: Annotated[
        str, typer.Option(help="More options of the router, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    router_tls_ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM certificates that sign the router's, where --router-options make it speak TLS.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_TLS,
        ),
    ] = None,
    router_tls_cert_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM certificate to show it, where it asks for one.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_TLS,
        ),
    ] = None,
    router_tls_key_file: Annotated[
        Path | None,
        typer.Option(help="PEM key of that certificate.", exists=True, dir_okay=False, rich_help_panel=_TLS),
    ] = None,
    router_tls_server_name: Annotated[
        str, typer.Option(help="Name in the router's certificate, where it is not the host's.", rich_help_panel=_TLS)
    ] = "",
    log_directory: Annotated[Path | None, typer.Option(help="Where to keep <service>.log; default: not kept.")] = None,
) -> None:
    """Run all three services on this machine until Ctrl-C."""
    needs = tuple(dict.fromkeys((*service_commands.ROUTER_NEEDS, *service_commands.WORKER_NEEDS)))
    service_commands.check_installed("up", extra="router,worker", needs=needs)
    target, draft = _models(target, draft)
    port = _port(host, port)
    split_router_options = _split("--router-options", router_options)
    tls = ClientTls(router_tls_ca_file, router_tls_cert_file, router_tls_key_file, router_tls_server_name)
    config = LocalServicesConfig(
        target=target,
        draft=draft,
        lookahead_model=lookahead_model,
        drafters=[name.strip() for name in drafters.split(",") if name.strip()],
        dtype=dtype,
        verify_threads=threads,
        draft_threads=draft_threads,
        compile=compile,
        num_verify_workers=num_verify_workers,
        num_draft_workers=num_draft_workers,
        host=host,
        port=port,
        verify_options=_split("--verify-options", verify_options),
        draft_options=_split("--draft-options", draft_options),
        router_options=split_router_options,
        router_tls=_router_tls(split_router_options, tls),
        log_directory=log_directory,
        stop_grace_s=_STOP_GRACE_S,
    )
    console = Console(stderr=True)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _interrupt)  # the terminal was closed
    try:
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
    is_interrupted = False
    try:
        _announce(services)
        _watch(services, console)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        _stop(services, console)
        let_go_of_output()
    if not is_interrupted:
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def shown_progress(console: Console) -> Iterator[ProgressView]:
    """A view of starting services: bars on a terminal, a line per change elsewhere."""
    if not console.is_terminal:
        yield lambda name, progress: console.print(f"{name}: {progress.stage} ({progress.fraction:.0%})", markup=False)
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


def _models(target: str | None, draft: str | None) -> tuple[str, str]:
    if target is not None:
        return target, draft or ""
    embedded = embedded_models()
    if embedded is None:
        raise typer.BadParameter("there is no models/target here; name a model", param_hint="--target")
    return str(embedded / "target"), draft or str(embedded / "draft")


def _split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=option) from None


def _router_tls(router_options: Sequence[str], tls: ClientTls) -> ClientTls | None:
    """How to reach the router, None = in plain text; finds out before models load whether it can be reached.

    Raises:
        typer.BadParameter: the router would speak TLS and this command not, or the other way round.
    """
    for name in ("BETOKEN_TLS_CERT_FILE", "BETOKEN_WORKER_TLS_CA_FILE"):
        if os.environ.get(name):
            text = "is for services on several machines; here only the router speaks TLS, by --router-options"
            raise typer.BadParameter(text, param_hint=name)
    if any(option.partition("=")[0] == "--tls-cert-file" for option in router_options):
        if tls.ca_file is None:
            text = "the router would speak TLS: say with --router-tls-ca-file which certificates to trust"
            raise typer.BadParameter(text, param_hint="--router-options")
        if (tls.cert_file is None) != (tls.key_file is None):
            raise typer.BadParameter("goes together with --router-tls-key-file", param_hint="--router-tls-cert-file")
        return tls
    if tls != ClientTls():
        text = "needs --tls-cert-file and --tls-key-file in --router-options"
        raise typer.BadParameter(text, param_hint="--router-tls-...")
    return None


def _complain(console: Console, error: Exception) -> None:
    """Lines of a log stay whole, so that they can be searched for."""
    console.print(f"betoken: {error}", style="red", markup=False, highlight=False, soft_wrap=True)


def _port(host: str, port: int | None) -> int:
    """The router's port; finds out before models load whether it can be had.

    Raises:
        typer.BadParameter: it cannot; the text says whether because of the host or of the port.
    """
    if host.startswith("unix:"):
        if port:
            raise typer.BadParameter(f"{port}: a Unix socket has no port", param_hint="--port")
        if not is_socket(host) or not Path(host.removeprefix("unix:")).parent.is_dir():
            raise typer.BadParameter(f"{host!r} is no unix:/PATH in a folder that exists", param_hint="--host")
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(host.removeprefix("unix:"))
            raise typer.BadParameter(f"{host}: {os.strerror(errno.EADDRINUSE)}", param_hint="--host")
        return 0
    port = _DEFAULT_PORT if port is None else port
    try:
        _probe(host.strip("[]"), port)
    except (OSError, UnicodeError) as error:
        is_host = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
        reason = getattr(error, "strerror", None) or error
        text, option = (f"{host!r}: {reason}", "--host") if is_host else (f"{host}:{port}: {reason}", "--port")
        raise typer.BadParameter(text, param_hint=option) from None
    return port


def _probe(host: str, port: int) -> None:
    """Listens for a moment on one of the addresses that the host stands for; one is enough, as it is for the router.

    Raises:
        OSError, UnicodeError: the host stands for none, or for none that can be had.
    """
    problems: list[OSError] = []
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
            return
        except OSError as error:
            problems.append(error)
    raise problems[0]


def _announce(services: LocalServices) -> None:
    for name, service in services.services.items():
        sys.stderr.write(f"{name:9} {service.address}  pid {service.pid}\n")
    options = ["--address", services.address]
    if (tls := services.config.router_tls) is not None:
        files = {"ca-file": tls.ca_file, "cert-file": tls.cert_file, "key-file": tls.key_file}
        named = files | {"server-name": tls.server_name}
        options += [part for name, value in named.items() if value for part in (f"--tls-{name}", str(value))]
    sys.stderr.write(f"try: betoken generate {shlex.join(options)} 'def fibonacci(n):'\nCtrl-C stops all\n")
    print(services.address, flush=True)


def _watch(services: LocalServices, console: Console) -> None:
    """Returns when a service has ended that the others cannot do without."""
    lost: set[str] = set()
    verifiers = [name for name in services.services if name.startswith("verify")]
    while True:
        for name, service in services.services.items():
            if name in lost or service.is_running:
                continue
            lost.add(name)
            try:
                service.check()
            except ServiceFailedError as error:
                _complain(console, error)
            if name == "router" or lost.issuperset(verifiers):
                return
            console.print("going on without it: same tokens, slower")
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
