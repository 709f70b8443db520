"""The `betoken` command: its commands and what they share.

Each command is a separate module.
"""

from __future__ import annotations

from typing import Annotated

import typer

from betoken.cli import services
from betoken.cli.bench import BenchOptions, bench
from betoken.cli.chat import ChatOptions, chat
from betoken.cli.command import command
from betoken.cli.demo import DemoOptions, demo
from betoken.cli.doctor import DoctorOptions, doctor
from betoken.cli.generate import generate
from betoken.cli.generate_options import GenerateOptions
from betoken.cli.info import InfoOptions, info
from betoken.cli.measure import MeasureOptions, measure
from betoken.cli.new_key import new_key
from betoken.cli.plan import PlanOptions, print_plan
from betoken.cli.up import up
from betoken.cli.up_options import up_options_class
from betoken.common.release import __version__

app = typer.Typer(
    name="betoken",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Speculative decoding as a service: draft workers guess, verify workers decide, not one token changes.",
)
app.command()(command(up, up_options_class()))
app.command()(command(generate, GenerateOptions))
app.command()(command(chat, ChatOptions))
app.command()(command(info, InfoOptions))
app.command()(command(demo, DemoOptions))
app.command()(new_key)
app.command("plan")(command(print_plan, PlanOptions))
app.command()(command(measure, MeasureOptions))
app.command()(command(bench, BenchOptions))
app.command()(command(doctor, DoctorOptions))
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
