"""CONTRIBUTING lists the files that a sampling field is written in by hand."""

from __future__ import annotations

import re
from pathlib import Path

from tests.import_graph import FILES, ROOT

ELSEWHERE = {"CHANGELOG.md", "tests/rpc/test_sampling.py"}
"""Listed files outside the sources and the documentation."""
OPTIONAL = {"gateway/betoken/gateway/infill.py"}
"""Names the two penalties whose neutral values `/infill` sets; a new field needs nothing there."""


def test_contributing_lists_the_files_that_name_a_sampling_field() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add a request field")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE))
    sources = [path for package, path in FILES if package not in ("bench", "training")]
    pages: list[Path] = [*ROOT.glob("protos/**/*.proto"), *(ROOT / "docs").glob("*.md")]
    named = {str(path.relative_to(ROOT)) for path in (*sources, *pages) if "presence_penalty" in path.read_text()}
    assert named <= listed | OPTIONAL
    assert listed <= named | ELSEWHERE and len(listed) + 1 <= 12
