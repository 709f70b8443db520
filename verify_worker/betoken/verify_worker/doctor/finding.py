"""The result of one check: its level, what was found, and the cure. It knows no check."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    """Name of the check."""
    level: Level
    """An error prevents a start; a warning costs speed, or may prevent one."""
    found: str
    """State of the machine, in words."""
    cure: str = ""
    """Remedy; empty if nothing is wrong."""


def ok(name: str, found: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(name, "ok", found)


def warning(name: str, found: str, cure: str) -> Finding:
    """Return a finding that costs speed, or may prevent a start."""
    return Finding(name, "warning", found, cure)


def error(name: str, found: str, cure: str) -> Finding:
    """Return a finding that prevents a start."""
    return Finding(name, "error", found, cure)
