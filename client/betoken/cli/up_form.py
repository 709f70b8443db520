"""The options of `betoken up`, each declared once.

`up_options` holds them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from betoken.cli import up_options as options

_WORKERS = "Workers"
_TLS = "How to reach a router that speaks TLS"


@dataclass(frozen=True, kw_only=True)
class UpForm:
    """The values of the options."""

    target: Annotated[
        str | None, typer.Option(help="Target model: GGUF file, directory or hub id; default: models/target.")
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model: directory or hub id; default: models/draft if no target is named, else none."),
    ] = None
    lookahead_model: Annotated[
        str,
        typer.Option(
            envvar=options.LOOKAHEAD_VARIABLE,
            help="What the drafter `lookahead` iterates; default: the draft model, else the target.",
        ),
    ] = ""
    drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_DRAFTERS",
            help="Hosted drafters, the default first; empty = none; default: all of fused, model, ngram, staged for"
            " which there is a model; none if all of them are attached.",
        ),
    ] = None
    attached_drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_ATTACHED_DRAFTERS",
            help="Drafters that verify workers run between their forwards; empty = none; default: ngram if there is"
            " no draft model and --drafters is not given.",
        ),
    ] = None
    dtype: Annotated[str, typer.Option(envvar="BETOKEN_DTYPE", help="bfloat16, float16, float32 or auto.")] = "bfloat16"
    compile: Annotated[str, typer.Option(envvar="BETOKEN_COMPILE", help="auto, on or off.")] = "auto"
    host: Annotated[
        str,
        typer.Option(
            envvar="BETOKEN_HOST",
            help="Address the router listens on; 0.0.0.0 or :: for all; unix:/PATH = a socket.",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int | None,
        typer.Option(
            envvar="BETOKEN_PORT", min=0, max=65535, help="Port of the router; 0 = any free one; default: 50051."
        ),
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the gateway: a page, and OpenAI's HTTP; 0 = any free one; default: 8000, or any if that is"
            " taken.",
        ),
    ] = None
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Start no gateway.")] = False
    threads: Annotated[
        int | None,
        typer.Option(envvar="BETOKEN_THREADS", min=1, help="CPU threads of a verify worker.", rich_help_panel=_WORKERS),
    ] = None
    draft_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads of a draft worker.", rich_help_panel=_WORKERS)
    ] = 1
    num_verify_workers: Annotated[
        int, typer.Option(min=1, help="Verify workers started.", rich_help_panel=_WORKERS)
    ] = 1
    num_draft_workers: Annotated[int, typer.Option(min=0, help="Draft workers started.", rich_help_panel=_WORKERS)] = 1
    verify_options: Annotated[
        str, typer.Option(help="More options of the verify workers, in one text.", rich_help_panel=_WORKERS)
    ] = ""
    draft_options: Annotated[
        str, typer.Option(help="More options of the draft workers, in one text.", rich_help_panel=_WORKERS)
    ] = ""
    router_options: Annotated[
        str, typer.Option(help="More options of the router, in one text.", rich_help_panel=_WORKERS)
    ] = ""
    gateway_options: Annotated[
        str, typer.Option(help="More options of the gateway, in one text.", rich_help_panel=_WORKERS)
    ] = ""
    router_tls_ca_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM certificates that sign the router's, where --router-options make it speak TLS.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_TLS,
        ),
    ] = None
    router_tls_cert_file: Annotated[
        Path | None,
        typer.Option(
            help="PEM client certificate, if the router requires one.",
            exists=True,
            dir_okay=False,
            rich_help_panel=_TLS,
        ),
    ] = None
    router_tls_key_file: Annotated[
        Path | None,
        typer.Option(help="PEM key of that certificate.", exists=True, dir_okay=False, rich_help_panel=_TLS),
    ] = None
    router_tls_server_name: Annotated[
        str, typer.Option(help="Name in the router's certificate, if it differs from the host.", rich_help_panel=_TLS)
    ] = ""
    log_directory: Annotated[Path | None, typer.Option(help="Folder for a log of each service; default: not kept.")] = (
        None
    )
