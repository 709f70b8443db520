"""Claims of a cell's record: only what could have failed, and its setup."""

import asyncio
import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from betoken.bench import identity
from betoken.bench.identity_store import IdentityStore
from betoken.bench.matrix import MASKED, Cell, Disturbance, all_cells
from betoken.bench.matrix_runner import MatrixRunner, RunnerConfig
from betoken.bench.prompts import Prompt
from tests.lab.bench.made_up_runs import STATS

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


def stand_for_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "open_source", lambda *which: SimpleNamespace(fingerprint=lambda: "f"))


async def test_a_reference_that_only_equals_itself_counts_no_comparison(runner: MatrixRunner) -> None:
    stack: Any = IdleStack()
    reference = await runner._run_cell(Cell("bfloat16", 0.8), stack)
    other = await runner._run_cell(Cell("bfloat16", 0.8, concurrency=8), stack)
    assert (reference["compared"], reference["identical"], reference["against"]) == (0, 0, "")
    assert (other["compared"], other["identical"], other["against"]) == (2, 2, "own")
    assert reference["passed"] and other["passed"] and other["commit"]
    assert f"torch {version('torch')}" in other["machine"]


async def test_a_cell_that_was_to_be_disturbed_and_was_not_fails_and_says_so(
    runner: MatrixRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    stack: Any = IdleStack()
    await runner._run_cell(Cell("bfloat16", 0.8), stack)
    cell = Cell("bfloat16", 0.8, concurrency=8, disturbance=Disturbance.PREEMPTION)
    record = await runner._run_cell(cell, stack)
    assert record["identical"] == record["compared"] == 2 and not record["passed"]
    identity._print_cell(record)
    assert "FAILED  2/2 identical" in (line := capsys.readouterr().out) and "NOTHING DISTURBED" in line


def test_a_matrix_run_without_comparisons_is_not_a_success(
    runner: MatrixRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run_both() -> list[dict[str, Any]]:
        stack: Any = IdleStack()
        return [await runner._run_cell(Cell("bfloat16", 0.8, concurrency=n), stack) for n in (1, 8)]

    record, other = asyncio.run(run_both())

    async def keep(self: MatrixRunner, cells: Any) -> None:
        for kept in (record, other | {"machine": "another"}):
            self._store.append(kept)

    monkeypatch.setattr(MatrixRunner, "run", keep)
    stand_for_models(monkeypatch)
    arguments = ["--target", "t", "--draft", "d", "--out", str(tmp_path / "out"), "--cells", record["cell"]]
    assert identity.main(arguments) == 2
    assert "nothing was compared" in capsys.readouterr().err
    assert identity.main([*arguments, other["cell"]]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["compared"] == 2 and summary["machines"] == sorted(["another", record["machine"]])


def test_each_matrix_cell_has_its_reference() -> None:
    reference = Cell("float32", 0.0)
    assert (reference.against, Cell("float32", 0.0, concurrency=8).against) == ("transformers", "own and transformers")


def test_cells_without_weights_or_draft_model_are_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    labels = ("model", "eagle3", "mtp", "fused@attached", "model_pard", "model_translated")
    cells = [cell for cell in all_cells() if cell.name in {f"float32-t0-{label}-k4-c1" for label in labels}]
    possible, left_out = identity._possible(cells, {"eagle3", MASKED})
    assert [cell.drafting.label for cell in possible] == ["model", "model_pard", "eagle3", "fused@attached"]
    assert len(left_out) == 2 and "2 cells left out, without" in (line := capsys.readouterr().err)
    assert "mtp layers" in line and "--translated" in line
    with pytest.raises(ValueError, match="these cells need --eagle3"):
        identity._possible([cell for cell in cells if cell.drafting.label == "eagle3"], set())


def test_a_pattern_that_names_no_cell_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert identity.main(["--target", "t", "--draft", "d", "--cells", "flaot32-*"]) == 2
    assert "flaot32-*" in capsys.readouterr().err


def test_a_folder_made_with_other_options_of_the_workers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(self: MatrixRunner, cells: Any) -> None:
        """Start no services."""

    monkeypatch.setattr(MatrixRunner, "run", nothing)
    stand_for_models(monkeypatch)
    arguments = ["--target", "t", "--draft", "d", "--out", str(tmp_path)]
    identity.main([*arguments, "--few-pages", "64"])
    assert "was made with" not in capsys.readouterr().err
    for name, *change in (("few_pages", "--few-pages", "96"), ("compile", "--compile", "off")):
        assert identity.main([*arguments, *change]) == 2
        assert f"was made with {name}" in capsys.readouterr().err
