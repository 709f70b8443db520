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
from betoken.cli import up_checks
from betoken.cli.connection import EXIT_FAILED, let_go_of_output
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.starting import check_can_start, complain, interrupt, started, stop
from betoken.cli.supervision import Supervisor
from betoken.cli.up_options import UpOptions
from betoken.client import ClientTls
from betoken.common.release import how_to_install

_CHECK_INTERVAL_S = 0.25
_EMBEDDED_PROMPT, _PROMPT = "--raw 'def fibonacci(n):'", "'Write a haiku about rivers.'"
"""Examples for the embedded models, which complete code, and for others."""
_STOP_GRACE_S = 3660.0
"""Above the longest `--drain-grace-s`: services end by themselves within their own; interrupted again, at once."""


def up(options: UpOptions) -> None:
    """Run all services on this machine until Ctrl-C."""
    check_can_start("up")
    console = Console(stderr=True)
    config = services_config(options, console)
    signal.signal(signal.SIGTERM, interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, interrupt)  # the terminal was closed
    names = (*(config.drafters or ()), *config.attached_drafters)
    if options.drafters is None and (left_out := up_checks.left_out(names)):
        text = f"betoken: no --draft: without the drafters {', '.join(left_out)}"
        console.print(text, markup=False, soft_wrap=True)
    services = started(config, console)
    is_interrupted = False
    try:
        _announce(services, _EMBEDDED_PROMPT if options.target is None else _PROMPT)
        _watch(services, console)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        stop(services, console)
        let_go_of_output()
    if not is_interrupted:
        raise typer.Exit(EXIT_FAILED)


def services_config(options: UpOptions, console: Console) -> LocalServicesConfig:
    """The services to start, all options checked.

    Raises:
        typer.BadParameter: options that do not fit together, or this machine.
    """
    target, draft = up_checks.models(options.target, options.draft)
    models = up_checks.drafter_models(target, draft, options.weights)
    verify_options = up_checks.split("--verify-options", options.verify_options)
    attached = up_checks.attached(options.attached_drafters, options.drafters, verify_options)
    names = up_checks.drafters(options.drafters, models, attached)
    up_checks.check_models_are_used(
        (*names, *attached), models, options.weights, is_draft_named=options.draft is not None
    )
    named = {"--draft": draft} | {up_checks.flag(name): value for name, value in options.weights.items()}
    up_checks.check_paths({"--target": target} | named)
    router_options = up_checks.split("--router-options", options.router_options)
    is_translated = up_checks.check_tokenizers(target, named if names else {}, router_options, names)
    if is_translated:
        text = f"betoken: {draft} has another tokenizer than {target}: its drafts are translated"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    translation = ["--target-tokenizer", target] if is_translated else []
    port = up_checks.checked_port(options.host, options.port)
    http_port = None if options.no_gateway else _http_port(options.host, options.http_port, console)
    tls = ClientTls(
        options.router_tls_ca_file,
        options.router_tls_cert_file,
        options.router_tls_key_file,
        options.router_tls_server_name,
    )
    return LocalServicesConfig(
        target=target,
        draft=draft,
        weights=options.weights,
        drafters=names,
        attached_drafters=attached,
        dtype=options.dtype,
        verify_threads=options.threads,
        draft_threads=options.draft_threads,
        compile=options.compile,
        num_verify_workers=options.num_verify_workers,
        num_draft_workers=options.num_draft_workers,
        host=options.host,
        port=port,
        verify_options=verify_options,
        draft_options=[*translation, *up_checks.split("--draft-options", options.draft_options)],
        router_options=router_options,
        http_port=http_port,
        gateway_options=up_checks.split("--gateway-options", options.gateway_options),
        router_tls=up_checks.router_tls(router_options, tls),
        log_directory=options.log_directory,
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
    return up_checks.checked_http_port(host, port)


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
