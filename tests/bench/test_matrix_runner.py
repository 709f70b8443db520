"""What a cell's record claims: nothing that could not have failed, and the commit it was run at."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.bench import identity
from foretoken.bench.identity_store import IdentityStore
from foretoken.bench.matrix import Cell
from foretoken.bench.matrix_runner import MatrixRunner, RunnerConfig
from foretoken.bench.prompts import Prompt
from tests.bench.made_up_runs import STATS

PROMPTS = [Prompt(0, "a"), Prompt(1, "b")]


class IdleStack:
    async def num_preemptions(self) -> int:
        return 0

    async def all_pages_free(self) -> bool:
        return True


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MatrixRunner:
    """Whatever the cell, prompt i is answered with the ids (i, i + 1)."""

    async def answers(self: MatrixRunner, cell: Cell, stack: Any) -> tuple[list[Any], int]:
        return [SimpleNamespace(output_ids=(i, i + 1), speculation=STATS) for i in range(2)], 0

    monkeypatch.setattr(MatrixRunner, "_answers", answers)
    return MatrixRunner(RunnerConfig("t", "d", 2, 8, "off"), PROMPTS, IdentityStore(tmp_path, {}), lambda record: None)


async def test_a_reference_that_only_equals_itself_counts_no_comparison(runner: MatrixRunner) -> None:
    stack: Any = IdleStack()
    reference = await runner._run_cell(Cell("bfloat16", 0.8), stack)
    other = await runner._run_cell(Cell("bfloat16", 0.8, concurrency=8), stack)
    assert (reference["compared"], reference["identical"], reference["against"]) == (0, 0, "")
    assert (other["compared"], other["identical"], other["against"]) == (2, 2, "own")
    assert reference["passed"] and other["passed"] and other["commit"]


def test_what_cells_are_held_against() -> None:
    reference = Cell("float32", 0.0)
    assert (reference.against, Cell("float32", 0.0, concurrency=8).against) == ("transformers", "own and transformers")


def test_a_pattern_that_names_no_cell_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert identity.main(["--target", "t", "--draft", "d", "--cells", "flaot32-*"]) == 2
    assert "flaot32-*" in capsys.readouterr().err


def test_a_folder_made_with_other_options_of_the_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(self: MatrixRunner, cells: Any) -> None:
        """Start no services."""

    monkeypatch.setattr(MatrixRunner, "run", nothing)
    monkeypatch.setattr(identity, "hash_weights", lambda folder: "f")
    monkeypatch.setattr(identity, "resolve_directory", lambda name, revision: Path(name))
    arguments = ["--target", "t", "--draft", "d", "--out", str(tmp_path)]
    assert identity.main([*arguments, "--few-pages", "64"]) == 0
    assert identity.main([*arguments, "--few-pages", "96"]) == 2
    assert identity.main([*arguments, "--compile", "off"]) == 2
    assert "few_pages" in capsys.readouterr().err
