"""The `foretoken` command: its commands and what they share.

Each command is a module of its own.
"""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from foretoken.cli import services
from foretoken.cli.generate import generate
from foretoken.cli.info import info
from foretoken.cli.up import up

app = typer.Typer(
    name="foretoken",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding as a service: draft workers guess, verify workers decide, not one token changes.",
)
app.command()(up)
app.command()(generate)
app.command()(info)
for name, run in (
    ("router", services.router),
    ("draft-worker", services.draft_worker),
    ("verify-worker", services.verify_worker),
):
    app.command(name, context_settings=services.PASS_THROUGH, add_help_option=False)(run)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(metadata.version("foretoken"))
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
