"""The words of a command line: placeholders of options in `--help`, and one line for each bad option."""

from collections.abc import Iterable, Mapping
from typing import Any

PLACEHOLDERS = {"str": "TEXT", "int": "N", "float": "NUMBER", "Path": "PATH", "tuple[str,...]": "TEXT,..."}
"""By the name of an option's type."""


def described_faults(
    faults: Iterable[Mapping[str, Any]], program: str, env_prefix: str, meanings: Mapping[str, str | None]
) -> str:
    """Return one line for each bad option: its name, its value, what is acceptable.

    Args:
        faults: entries of a pydantic ValidationError.
        meanings: description of each field, shown if the field is missing.
    """
    lines = []
    for fault in faults:
        text = fault["msg"].removeprefix("Value error, ")
        if fault["loc"]:
            name = str(fault["loc"][0])
            is_missing = fault["type"] == "missing"
            value = "" if is_missing else f" = {fault['input']!r}"
            text = f"must be given. {meanings.get(name) or ''}".rstrip() if is_missing else text
            text = f"--{name.replace('_', '-')} ({env_prefix}{name.upper()}){value}: {text}"
        lines.append(f"{program}: {text}")
    return "\n".join(lines)
