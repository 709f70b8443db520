"""Writes commands.md next to this file: every option of the commands, services apart, from the commands themselves.

`--check` compares instead and fails when the page is out of date.
"""

import inspect
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import OptionInfo, ParameterInfo

from betoken.cli.main import app
from betoken.cli.services import PASS_THROUGH

PAGE = Path(__file__).with_name("commands.md")
HEAD = """# Commands

Options of the commands other than services; for services see [settings](settings.md).
An option given on the command line overrides the variable next to it, which overrides the default. A switch takes no
value. This page is made by `make docs`; a test compares it with the commands.
"""
COMMANDS: dict[str, Callable[..., None]] = {
    command.name or command.callback.__name__.replace("_", "-"): command.callback
    for command in app.registered_commands
    if command.callback is not None and command.context_settings != PASS_THROUGH
}
"""Commands with their own options; the others pass all options to a service."""


def render() -> str:
    """The page."""
    return HEAD + "".join(_section(name, command) for name, command in COMMANDS.items())


def _section(name: str, command: Callable[..., None]) -> str:
    hints = get_type_hints(command, include_extras=True)
    panels: dict[str, list[str]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind, description = get_args(hints[parameter.name])
        rows = panels.setdefault(description.rich_help_panel or "", [])
        rows.append(_row(parameter, kind, description))
    head = "| option | environment | default | meaning |\n|---|---|---|---|\n"
    tables = [(f"\n### {title}\n\n" if title else "\n") + head + "".join(rows) for title, rows in panels.items()]
    return f"\n## betoken {name}\n\n{inspect.getdoc(command)}\n" + "".join(tables)


def _row(parameter: inspect.Parameter, kind: Any, description: ParameterInfo) -> str:
    name, default = parameter.name.rstrip("_"), parameter.default
    declared = description.param_decls or () if isinstance(description, OptionInfo) else (name.upper(),)
    option = next(iter(declared), f"--{name.replace('_', '-')}")
    is_silent = default is None or default == "" or isinstance(default, bool)
    shown = "required" if default is parameter.empty else "–" if is_silent else f"`{default}`"
    meaning = (description.help or "").replace("|", "\\|") + _limits(kind, description)
    variable = f"`{description.envvar}`" if description.envvar else "–"
    return f"| `{option}` | {variable} | {shown} | {meaning} |\n"


def _limits(kind: Any, description: ParameterInfo) -> str:
    bounds = {"≥": description.min, "≤": description.max}
    texts = [", ".join(f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None)]
    enums = [part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, Enum)]
    texts += [" \\| ".join(str(choice.value) for choice in enum) for enum in enums]
    return f" ({text})" if (text := "; ".join(filter(None, texts))) else ""


def main() -> int:
    """Write or check the page."""
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
