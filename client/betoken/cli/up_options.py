"""The options of `betoken up`, each declared once. Options of drafters come from the registry.

`up_checks` holds them against each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from betoken.drafters.registry import Option

_WORKERS = "Workers"
_WEIGHTS = "Models and weights of drafters"
_TLS = "How to reach a router that speaks TLS"
try:
    from betoken.drafters.registry import SPECS, usual_attached, weight_options
except ModuleNotFoundError:  # the services are not installed
    _USUAL = _USUAL_ATTACHED = "the usual drafters"
    _OPTIONS: list[Option] = []
else:
    _USUAL = ", ".join(spec.name for spec in SPECS.values() if spec.is_usual)
    _USUAL_ATTACHED = ", ".join(usual_attached())
    _OPTIONS = weight_options(lambda spec: True)


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The values of the options."""

    target: Annotated[
        str | None,
        typer.Option(
            help="Target model: GGUF file, directory, hub id, or OWNER/NAME:Q4_K_M, a GGUF file of the hub; default:"
            " models/target."
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(help="Draft model, named likewise; default: models/draft if no target is named, else none."),
    ] = None
    drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_DRAFTERS",
            help=f"Hosted drafters, the default first; empty = none; default: all of {_USUAL} for which there is a"
            " model; none if all of them are attached.",
        ),
    ] = None
    attached_drafters: Annotated[
        str | None,
        typer.Option(
            envvar="BETOKEN_ATTACHED_DRAFTERS",
            help=f"Drafters that verify workers run between their forwards; empty = none; default: {_USUAL_ATTACHED},"
            " unless --drafters is given.",
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

    @property
    def weights(self) -> dict[str, str]:
        """Models and weights of drafters, by option, without empty ones."""
        own = {each.name for each in fields(UpOptions)}
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in own}
        return {name: value for name, value in named.items() if value}


def up_options_class() -> type[UpOptions]:
    """`UpOptions`, if the services are installed with the options for models and weights of drafters."""
    declared = [
        (
            option.name,
            Annotated[
                str,
                typer.Option(envvar=f"BETOKEN_{option.name.upper()}", help=option.help, rich_help_panel=_WEIGHTS),
            ],
            field(default=""),
        )
        for option in _OPTIONS
    ]
    weights = make_dataclass("Weights", declared, frozen=True, kw_only=True)
    return make_dataclass("UpOptions", [], bases=(UpOptions, weights), frozen=True, kw_only=True)
