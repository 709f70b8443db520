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
from pathlib import Path
from types import FrameType
from typing import Annotated, Protocol

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
from betoken.client import BetokenError, ClientTls
from betoken.common.release import how_to_install

_CHECK_INTERVAL_S = 0.25
_STOP_GRACE_S = 3660.0
"""Above the longest `--drain-grace-s`: services end by themselves within their own; interrupted again, at once."""
_WORKERS = "Workers"
_TLS = "How to reach a router that speaks TLS"


class ProgressView(Protocol):
    """Shows how far a service's start is."""

    def __call__(self, name: str, progress: Progress) -> None: ...


def up(
    target: Annotated[
        str | None, typer.Option(help="Target model: GGUF file, directory or hub id; default: models/target.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model, likewise; default: models/draft where no target is named, else none."),
    ] = None,
    lookahead_model: Annotated[
        str,
        typer.Option(
            envvar=options.LOOKAHEAD_VARIABLE,
            help="What the drafter `lookahead` iterates; default: the draft model, else the target.",
        ),
    ] = "",
    drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_DRAFTERS",
            help="Hosted drafters, the default first; empty = none; default: those of fused,model,ngram,staged for"
            " which the models suffice; none where all of them are attached.",
        ),
    ] = None,
    attached_drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_ATTACHED_DRAFTERS",
            help="Drafters that verify workers run between their forwards; empty = none; default: ngram where there is"
            " no draft model and --drafters is not given.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(envvar="BETOKEN_DTYPE", help="bfloat16, float16, float32 or auto.")
    ] = "bfloat16",
    compile: Annotated[str, typer.Option(envvar="BETOKEN_COMPILE", help="auto, on or off.")] = "auto",
    host: Annotated[
        str,
        typer.Option(
            envvar="BETOKEN_HOST",
            help="Address the router listens on; 0.0.0.0 or :: for all; unix:/PATH = a socket.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            envvar="BETOKEN_PORT", min=0, max=65535, help="Port of the router; 0 = any free one; default: 50051."
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the gateway: a page, and OpenAI's HTTP; 0 = any free one; default: 8000, or any where that is"
            " taken.",
        ),
    ] = None,
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Start no gateway.")] = False,
    threads: Annotated[
        int | None,
        typer.Option(envvar="BETOKEN_THREADS", min=1, help="CPU threads of a verify worker.", rich_help_panel=_WORKERS),
    ] = None,
    draft_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of a draft worker.", rich_help_panel=_WORKERS)
    ] = 1,
    num_verify_workers: Annotated[
        int, typer.Option(min=1, help="Verify workers started.", rich_help_panel=_WORKERS)
    ] = 1,
    num_draft_workers: Annotated[int, typer.Option(min=0, help="Draft workers started.", rich_help_panel=_WORKERS)] = 1,
    verify_options: Annotated[
        str, typer.Option(help="More options of the verify workers, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    draft_options: Annotated[
        str, typer.Option(help="More options of the draft workers, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    router_options: Annotated[
        str, typer.Option(help="More options of the router, in one text.", rich_help_panel=_WORKERS)
    ] = "",
    gateway_options: Annotated[
        str, typer.Option(help="More options of the gateway, in one text.", rich_help_panel=_WORKERS)
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
    log_directory: Annotated[
        Path | None, typer.Option(help="Folder for a log of each service; default: not kept.")
    ] = None,
) -> None:
    """Run all services on this machine until Ctrl-C."""
    needs = tuple(dict.fromkeys((*service_commands.ROUTER_NEEDS, *service_commands.WORKER_NEEDS)))
    service_commands.check_installed("up", extra="router,worker", needs=needs)
    is_draft_named = draft is not None
    target, draft = options.models(target, draft)
    models = options.Models(draft, target, lookahead_model)
    split_verify_options = options.split("--verify-options", verify_options)
    attached = options.attached(attached_drafters, drafters, models, split_verify_options)
    names = options.drafters(drafters, models, attached)
    options.check_models_are_used(names, models, is_draft_named)
    hosted = {"--draft": draft, "--lookahead-model": lookahead_model}
    options.check_tokenizers(target, hosted if names else {})
    port = options.checked_port(host, port)
    console = Console(stderr=True)
    http_port = None if no_gateway else _http_port(host, http_port, console)
    split_router_options = options.split("--router-options", router_options)
    tls = ClientTls(router_tls_ca_file, router_tls_cert_file, router_tls_key_file, router_tls_server_name)
    config = LocalServicesConfig(
        target=target,
        draft=draft,
        lookahead_model=lookahead_model,
        drafters=names,
        attached_drafters=attached,
        dtype=dtype,
        verify_threads=threads,
        draft_threads=draft_threads,
        compile=compile,
        num_verify_workers=num_verify_workers,
        num_draft_workers=num_draft_workers,
        host=host,
        port=port,
        verify_options=split_verify_options,
        draft_options=options.split("--draft-options", draft_options),
        router_options=split_router_options,
        http_port=http_port,
        gateway_options=options.split("--gateway-options", gateway_options),
        router_tls=options.router_tls(split_router_options, tls),
        log_directory=log_directory,
        stop_grace_s=_STOP_GRACE_S,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _interrupt)  # the terminal was closed
    try:
        if drafters is None and (left_out := options.left_out((*names, *attached))):
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


def _http_port(host: str, port: int | None, console: Console) -> int | None:
    """The gateway's port; None where its packages are missing and nobody asked for it."""
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


def _announce(services: LocalServices) -> None:
    for name, service in services.services.items():
        sys.stderr.write(f"{name:9} {service.address}  pid {service.pid}\n")
    for remark in services.remarks:
        sys.stderr.write(f"{remark}\n")
    options = ["--address", services.address]
    if (tls := services.config.router_tls) is not None:
        files = {"ca-file": tls.ca_file, "cert-file": tls.cert_file, "key-file": tls.key_file}
        named = files | {"server-name": tls.server_name}
        options += [part for name, value in named.items() if value for part in (f"--tls-{name}", str(value))]
    sys.stderr.write(f"try: betoken generate {shlex.join(options)} 'def fibonacci(n):'\n")
    if (gateway := services.services.get("gateway")) is not None:
        is_https = any(option.partition("=")[0] == "--tls-cert-file" for option in services.config.gateway_options)
        sys.stderr.write(f"open: http{'s' * is_https}://{gateway.address}  (OpenAI's protocol under /v1)\n")
    sys.stderr.write("Ctrl-C stops all\n")
    print(services.address, flush=True)


def _watch(services: LocalServices, console: Console) -> None:
    """Returns when a service has ended for good that the others cannot do without."""

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    supervisor = Supervisor(services.services, tell, lambda error: _complain(console, error))
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
