"""A constraint from the options of the command. Knows files, and nothing of grammars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from betoken.client import Constraint


def read_constraint(
    json_object: bool, json_schema: Path | None, regex: str | None, choice: Sequence[str] | None, lark: Path | None
) -> Constraint | None:
    """The given constraint; None without one.

    Raises:
        typer.BadParameter: two are given, or a file cannot be read.
    """
    given = {
        "--json-object": json_object or None,
        "--json-schema": json_schema,
        "--regex": regex,
        "--choice": choice or None,
        "--lark": lark,
    }
    options = [option for option, value in given.items() if value is not None]
    if len(options) > 1:
        raise typer.BadParameter(f"{options[0]} is given, too: one constraint at most", param_hint=options[1])
    if json_object:
        return {"json_object": True}
    if json_schema is not None:
        return {"json_schema": read_file(json_schema, "--json-schema")}
    if regex is not None:
        return {"regex": regex}
    if choice:
        return {"choice": choice}
    return {"lark": read_file(lark, "--lark")} if lark is not None else None


def read_file(path: Path, option: str) -> str:
    """The text of an option's file.

    Raises:
        typer.BadParameter: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint=option) from None
