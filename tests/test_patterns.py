"""Regular expressions of all sources: none repeats a repetition, which takes exponential time on hostile text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in ROOT.glob("*/betoken/**/*.py") if "_pb2" not in path.name)
CALLS = {"compile", "match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer"}
BACKTRACKING = {codes.MAX_REPEAT, codes.MIN_REPEAT}
MANY = 8
"""Repetitions from which on a repeat counts as unbounded."""


def patterns(source: str) -> Iterator[str]:
    """Literal patterns, an f-string's expressions left out."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=called), args=[first, *_]) if (
                called in CALLS
            ):
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                text = [part.value for part in parts if isinstance(part, ast.Constant)]
                yield "".join(each.decode("latin-1") if isinstance(each, bytes) else each for each in text)


def depth(nodes: Any) -> int:
    """Largest number of nested unbounded repeats that may backtrack."""
    deepest = 0
    for code, argument in nodes:
        repeats = code in BACKTRACKING and (argument[1] is codes.MAXREPEAT or argument[1] >= MANY)
        inner = [each for each in _flat(argument) if isinstance(each, parser.SubPattern)]
        is_nested = code in BACKTRACKING and argument[1] > 1
        within = max((depth(each) for each in inner), default=0)
        deepest = max(deepest, within + (repeats or (is_nested and within > 0)))
    return deepest


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)) and not isinstance(value, parser.SubPattern):
        for each in value:
            yield from _flat(each)
    else:
        yield value


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_regular_expression_of_a_source_nests_repeats(path: Path) -> None:
    for pattern in patterns(path.read_text()):
        assert depth(parser.parse(pattern)) < 2, pattern


@pytest.mark.parametrize("pattern", [r"\s*(?:\[[A-Z_]*\]?\s*\w*\s*)*", "(a+)+", "(?:a*b?){2,}", "(a*){1,3}"])
def test_a_regular_expression_with_nested_repeats_is_found(pattern: str) -> None:
    assert depth(parser.parse(pattern)) > 1
    assert re.compile(pattern)
