"""Writes results.md next to this file: one table for each file in lab/results, in the order of their names.

A file holds one run: machine, commit, date, setup, columns and rows. `--check` compares instead and fails when the page
is out of date.
"""

import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RUNS = DOCS.parent / "lab" / "results"
HEAD = """# Results

Newest figures first. Each table is one run of one commit on one machine. Tokens/s are medians of wall time through
real processes and gRPC. Machines are shared and their speed varies up to twofold within minutes: compare within a
table only. `make docs` makes this page from [lab/results](../lab/results); a test compares it. [Lessons](lessons.md)
lists rejected experiments.
"""


def render() -> str:
    """The page."""
    text, section = HEAD, ""
    for path in sorted(RUNS.glob("*.json")):
        run = read(path)
        if run["section"] != section:
            section = run["section"]
            text += f"\n## {section}\n"
        text += f"\n### {run['title']}\n\n{_origin(run)}\n\n{render_table(run)}"
        if run["notes"]:
            text += "\n" + "".join(f"- {note}\n" for note in run["notes"])
    return text


def render_table(run: dict[str, Any]) -> str:
    """The run's rows as Markdown. `quotient` names a column and the row whose value divides it in one more column."""
    columns, rows = list(run["columns"]), [list(row) for row in run["rows"]]
    if "quotient" in run:
        column, base = run["quotient"]
        place = columns.index(column)
        divisor = next(row[place] for row in rows if row[0] == base)
        columns.append(f"x {base.removeprefix('transformers, ')}")
        rows = [[*row, f"{row[place] / divisor:.1f}"] for row in rows]
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def read(path: Path) -> dict[str, Any]:
    """One run. Numbers keep the digits that the file gives them."""
    run: dict[str, Any] = json.loads(path.read_text(), parse_float=Decimal)
    return run


def _origin(run: dict[str, Any]) -> str:
    command = f"`{run['command']}`. " if run["command"] else ""
    compared = f" Compared and identical: {run['identical']}." if run["identical"] else ""
    return f"{command}{run['machine']}; commit {run['commit']}, {run['date']}; {run['setup']}.{compared}"


def main() -> int:
    """Writes the page, or with --check compares it. Returns the exit status."""
    page = DOCS / "results.md"
    if "--check" in sys.argv[1:]:
        return 0 if page.read_text() == render() else 1
    page.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
