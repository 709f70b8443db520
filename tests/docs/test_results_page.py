"""Figures come from lab/results; the pages show exactly these."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "docs" / "generate_results.py"))
RUNS = sorted((ROOT / "lab" / "results").glob("*.json"))


def test_the_results_page_equals_the_recorded_runs() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == GENERATOR["render"](), "run `make docs`"


def test_every_row_has_a_cell_for_every_column() -> None:
    assert RUNS
    for path in RUNS:
        run = GENERATOR["read"](path)
        assert {len(row) for row in run["rows"]} == {len(run["columns"])}, path.name


def test_the_readme_shows_the_newest_comparison() -> None:
    run = GENERATOR["read"](RUNS[0])
    readme = (ROOT / "README.md").read_text()
    assert GENERATOR["render_table"](run) in readme
    assert run["commit"] in readme
    assert run["date"] in readme
