"""Results of the exactness matrix, in one folder, so that a run can be interrupted and resumed.

`manifest.json` says what was run on; a folder made for other weights, prompts, lengths or workers' options is refused.
"""

import json
from pathlib import Path
from typing import Any

from betoken.bench.record_file import RecordFile, check_manifest, replace_file

Ids = tuple[int, ...]


class IdentityStore:
    """Finished cells, and reference ids of our runs and of `transformers`."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Open or make the folder.

        Raises:
            ValueError: the folder holds results of another manifest.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._cells = RecordFile(folder / "cells.jsonl")
        self._transformers_runs = RecordFile(folder / "transformers.jsonl")
        check_manifest(folder / "manifest.json", manifest)
        self.done: dict[str, dict[str, Any]] = {record["cell"]: record for record in self._cells.read()}
        self._transformers = {record["index"]: record for record in self._transformers_runs.read()}

    def append(self, record: dict[str, Any]) -> None:
        """Keep a finished cell."""
        self._cells.append(record)
        self.done[record["cell"]] = record

    def save_reference(self, name: str, ids: list[Ids]) -> None:
        """Keep the output ids of a reference cell, one list per prompt."""
        replace_file(self._reference_file(name), json.dumps(ids))

    def reference(self, name: str) -> list[Ids]:
        """Output ids of a reference cell, one tuple per prompt."""
        return [tuple(ids) for ids in json.loads(self._reference_file(name).read_text())]

    def save_transformers(self, index: int, prompt_ids: list[int], ids: list[int]) -> None:
        """Keep what `generate()` gave for one prompt."""
        record = {"index": index, "prompt_ids": prompt_ids, "ids": ids}
        self._transformers_runs.append(record)
        self._transformers[index] = record

    def transformers(self, index: int) -> tuple[list[int], list[int]] | None:
        """Prompt ids and output ids of `generate()` for one prompt, None when not run yet."""
        record = self._transformers.get(index)
        return (record["prompt_ids"], record["ids"]) if record else None

    def _reference_file(self, name: str) -> Path:
        return self._folder / f"reference-{name}.json"
