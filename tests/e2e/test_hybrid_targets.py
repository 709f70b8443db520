"""Targets and draft models whose layers mix tokens in other ways than attention, through real services."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hybrids import CELLS, CONFIGS, FURTHER, WIDER
from pair import make_pair

from betoken.bench.identity import main


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Runs cells over a random pair; how many there were, none of which failed."""

    def run_cells(name: str, cells: list[str], *options: str) -> int:
        make_pair(tmp_path, (CONFIGS | WIDER)[name]())
        arguments = ["--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft"), "--limit", "8"]
        arguments += ["--few-pages", "24", "--compile", "off", "--out", str(tmp_path / "out"), "--cells", *cells]
        status = main([*arguments, *options])
        output = capsys.readouterr().out
        num_references = 4 if cells == ["*"] else 0
        summary = json.loads(output.splitlines()[-1])
        assert status == 0, output
        assert summary["failed"] == 0 and summary["compared"] >= 8 * (summary["cells"] - num_references)
        assert summary["are_pages_free"]
        return int(summary["cells"])

    return run_cells


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_hybrid_target_are_those_of_no_speculation(run: Callable[..., int], name: str) -> None:
    assert run(name, CELLS[name], "--max-new-tokens", "24", "--prefix-caching") == len(CELLS[name])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WIDER)
def test_tokens_of_further_hybrid_targets_are_those_of_no_speculation(run: Callable[..., int], name: str) -> None:
    cells = [*(cell for cells in CELLS.values() for cell in cells), *FURTHER]
    assert run(name, cells, "--max-new-tokens", "32", "--prefix-caching") == len(cells)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_of_a_hybrid_target_are_those_of_no_speculation_in_the_whole_matrix(
    run: Callable[..., int], name: str
) -> None:
    assert run(name, ["*"], "--max-new-tokens", "32", "--prefix-caching") > 300
