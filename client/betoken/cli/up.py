"""`betoken up`: gateway, router, draft worker and verify worker as processes of this machine, until Ctrl-C.

Checks the options, prints the addresses and restarts services that ended.
"""

from __future__ import annotations

import shlex
import signal
import sys
import time

import typer
from rich.console import Console

from betoken.cli import services as service_commands
from betoken.cli import up_options as options
from betoken.cli.connection import EXIT_FAILED, let_go_of_output
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.starting import check_can_start, complain, interrupt, started, stop
from betoken.cli.supervision import Supervisor
from betoken.cli.up_form import UpForm
from betoken.client import ClientTls
from betoken.common.release import how_to_install

_CHECK_INTERVAL_S = 0.25
_EMBEDDED_PROMPT, _PROMPT = "--raw 'def fibonacci(n):'", "'Write a haiku about rivers.'"
"""Examples for the embedded models, which complete code, and for others."""
_STOP_GRACE_S = 3660.0
"""Above the longest `--drain-grace-s`: services end by themselves within their own; interrupted again, at once."""


def up(form: UpForm) -> None:
    """Run all services on this machine until Ctrl-C."""
    check_can_start("up")
    console = Console(stderr=True)
    config = services_config(form, console)
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, interrupt)  # the terminal was closed
    names = (*(config.drafters or ()), *config.attached_drafters)
    if form.drafters is None and (left_out := options.left_out(names)):
        text = f"betoken: no --draft: without the drafters {', '.join(left_out)}"
        console.print(text, markup=False, soft_wrap=True)
    services = started(config, console)
    is_interrupted = False
    try:
        _announce(services, _EMBEDDED_PROMPT if form.target is None else _PROMPT)
        _watch(services, console)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        stop(services, console)
        let_go_of_output()
    if not is_interrupted:
        raise typer.Exit(EXIT_FAILED)


def services_config(form: UpForm, console: Console) -> LocalServicesConfig:
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

    supervisor = Supervisor(services.services, report, lambda error: complain(console, error))
    while supervisor.step():
        time.sleep(_CHECK_INTERVAL_S)
