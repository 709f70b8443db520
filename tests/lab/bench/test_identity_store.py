"""Results of the matrix survive interruption, and never mix with another run's."""

from pathlib import Path

import pytest

from betoken.bench.identity_store import IdentityStore

MANIFEST = {"target": "t", "num_prompts": 2}


def test_finished_cells_of_the_identity_matrix_are_found_again(tmp_path: Path) -> None:
    store = IdentityStore(tmp_path, MANIFEST)
    store.append({"cell": "a", "compared": 2})
    store.save_reference("a", [(1, 2), (3,)])
    store.save_transformers(1, [7], [8, 9])
    again = IdentityStore(tmp_path, MANIFEST)
    assert again.done == {"a": {"cell": "a", "compared": 2}}
    assert again.reference("a") == [(1, 2), (3,)]
    assert again.transformers(1) == ([7], [8, 9])
    assert again.transformers(0) is None


def test_a_cell_with_a_truncated_line_is_run_again(tmp_path: Path) -> None:
    IdentityStore(tmp_path, MANIFEST).append({"cell": "a"})
    with (tmp_path / "cells.jsonl").open("a") as file:
        file.write('{"cell": "b", "comp')
    store = IdentityStore(tmp_path, MANIFEST)
    assert list(store.done) == ["a"]
    store.append({"cell": "b"})
    assert list(IdentityStore(tmp_path, MANIFEST).done) == ["a", "b"]


def test_an_identity_folder_of_another_run_is_rejected(tmp_path: Path) -> None:
    IdentityStore(tmp_path, MANIFEST)
    with pytest.raises(ValueError, match="num_prompts 2, this run has 3"):
        IdentityStore(tmp_path, MANIFEST | {"num_prompts": 3})
