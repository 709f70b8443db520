"""Docs of fields and functions begin with what they are about."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for root in (
        *("common", "kernels", "engine", "rpc", "client", "drafters", "draft_worker", "verify_worker", "router"),
        *("gateway", "testing", "lab", "examples", "docs"),
    )
    for path in (ROOT / root).rglob("*.py")
    if "_pb2" not in path.name
)
FRAGMENT = re.compile(r"(Of|That of|Those|Both|Nor|Whether neither)\b")
"""Beginnings that leave the reader to find the noun."""


def docs(path: Path) -> Iterator[tuple[int, str]]:
    """Every string that is a statement, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("root", sorted({path.relative_to(ROOT).parts[0] for path in SOURCES}))
def test_docs_begin_with_a_noun(root):
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] == root
        for line, text in docs(path)
        if FRAGMENT.match(text)
    ]
    assert not fragments, "\n".join(fragments)
