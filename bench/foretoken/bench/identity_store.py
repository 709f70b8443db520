"""What the exactness matrix has found so far, in one folder, so that a run can be interrupted and resumed.

`manifest.json` says what was run on; a folder made for other weights, prompts or lengths is refused.
"""

import json
from pathlib import Path
from typing import Any

Ids = tuple[int, ...]


class IdentityStore:
    """Finished cells, the reference ids of our own runs, and those of `transformers`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Open or make the folder.

        Raises:
            ValueError: the folder holds results of another manifest.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._cells_file = folder / "cells.jsonl"
        self._transformers_file = folder / "transformers.jsonl"
        self._check(manifest)
        self.done: dict[str, dict[str, Any]] = {record["cell"]: record for record in _lines(self._cells_file)}
        self._transformers = {record["index"]: record for record in _lines(self._transformers_file)}

    def append(self, record: dict[str, Any]) -> None:
        """Keep a finished cell."""
        _append(self._cells_file, record)
        self.done[record["cell"]] = record

    def save_reference(self, name: str, ids: list[Ids]) -> None:
        """Keep the output ids of a reference cell, one list per prompt."""
        self._reference_file(name).write_text(json.dumps(ids))

    def reference(self, name: str) -> list[Ids]:
        """Output ids of a reference cell, one tuple per prompt."""
        return [tuple(ids) for ids in json.loads(self._reference_file(name).read_text())]

    def save_transformers(self, index: int, prompt_ids: list[int], ids: list[int]) -> None:
        """Keep what `generate()` gave for one prompt."""
        record = {"index": index, "prompt_ids": prompt_ids, "ids": ids}
        _append(self._transformers_file, record)
        self._transformers[index] = record

    def transformers(self, index: int) -> tuple[list[int], list[int]] | None:
        """Prompt ids and output ids of `generate()` for one prompt, None when not run yet."""
        record = self._transformers.get(index)
        return (record["prompt_ids"], record["ids"]) if record else None

    def _reference_file(self, name: str) -> Path:
        return self._folder / f"reference-{name}.json"

    def _check(self, manifest: dict[str, Any]) -> None:
        path = self._folder / "manifest.json"
        if not path.exists():
            path.write_text(json.dumps(manifest, indent=2))
            return
        found = json.loads(path.read_text())
        for name, value in manifest.items():
            if found.get(name) != value:
                raise ValueError(f"{self._folder} was made with {name} {found.get(name)!r}, this run has {value!r}")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file; a last line cut off by an interruption is dropped."""
    records: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(json.loads(line))
    return records


def _append(path: Path, record: dict[str, Any]) -> None:
    _drop_cut_line(path)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _drop_cut_line(path: Path) -> None:
    if path.exists():
        text = path.read_text()
        if text and not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1])
