"""The `betoken` command: its commands and what they share.

Each command is a separate module.
"""

from __future__ import annotations

from typing import Annotated

import typer

from betoken.cli import services
from betoken.cli.bench import BenchForm, bench
from betoken.cli.chat import ChatForm, chat
from betoken.cli.command import command
from betoken.cli.demo import DemoForm, demo
from betoken.cli.generate import generate
from betoken.cli.generate_form import GenerateForm
from betoken.cli.info import InfoForm, info
from betoken.cli.measure import MeasureForm, measure
from betoken.cli.new_key import new_key
from betoken.cli.plan import PlanForm, print_plan
from betoken.cli.up import up
from betoken.cli.up_form import up_form
from betoken.common.release import __version__

app = typer.Typer(
    name="betoken",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding as a service: draft workers guess, verify workers decide, not one token changes.",
)
app.command()(command(up, up_form()))
app.command()(command(generate, GenerateForm))
app.command()(command(chat, ChatForm))
app.command()(command(info, InfoForm))
app.command()(command(demo, DemoForm))
app.command()(new_key)
app.command("plan")(command(print_plan, PlanForm))
app.command()(command(measure, MeasureForm))
app.command()(command(bench, BenchForm))
for name, run in (
    ("router", services.router),
    ("draft-worker", services.draft_worker),
    ("verify-worker", services.verify_worker),
    ("gateway", services.gateway),
    ("check-keys", services.check_keys),
    ("train", services.train),
    ("quantize", services.quantize),
):
    app.command(name, context_settings=services.PASS_THROUGH, add_help_option=False)(run)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
