"""The commands page says what the commands say."""

import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from betoken.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
GENERATOR = runpy.run_path(str(DOCS / "generate_commands.py"))


def test_the_commands_page_equals_the_help_of_the_commands() -> None:
    assert (DOCS / "commands.md").read_text() == GENERATOR["render"](), "run `make docs`"


@pytest.mark.parametrize("command", GENERATOR["COMMANDS"])
def test_every_option_that_help_shows_is_on_the_page_with_a_meaning(command: str) -> None:
    page = (DOCS / "commands.md").read_text()
    part = page.partition(f"## betoken {command}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in part.splitlines() if line.startswith("| `")]
    shown = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [command, "--help"]).output
    options = set(re.findall(r"--[a-z][a-z0-9-]+", shown)) - {"--help"}
    assert {row[0].strip(" `") for row in rows if row[0].strip(" `").startswith("--")} == options
    assert all(row[3].strip() for row in rows), rows


def test_a_required_argument_has_no_default() -> None:
    assert "| `NAME` | – | required |" in GENERATOR["render"]() and "inspect._empty" not in GENERATOR["render"]()
