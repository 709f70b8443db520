"""Schemas for structured answers: cases of the JSON Schema Test Suite that grammars keep, and ten realistic ones.

`suite.jsonl` is made by `collect`; its cases are under `suite.LICENSE`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = ("realistic.jsonl", "suite.jsonl")


@dataclass(frozen=True, slots=True)
class Case:
    """One schema."""

    name: str
    """Source of the schema and the feature that it covers."""
    schema: dict[str, Any]


def load_cases() -> list[Case]:
    """All of them, the realistic ones first."""
    lines = [line for name in _FILES for line in Path(__file__).with_name(name).read_text().splitlines()]
    return [Case(**json.loads(line)) for line in lines]
