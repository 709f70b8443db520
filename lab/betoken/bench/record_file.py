"""Files of finished work that survive an interruption: records one a line, and a manifest of what they belong to."""

import json
import os
from pathlib import Path
from typing import Any


class RecordFile:
    """JSON objects, one a line, only ever appended to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[dict[str, Any]]:
        """All records; a last line cut off by an interruption is dropped."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def append(self, record: dict[str, Any]) -> None:
        """Keep one more."""
        self._drop_cut_line()
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _drop_cut_line(self) -> None:
        if self._path.exists():
            text = self._path.read_bytes()
            if not text.endswith(b"\n"):
                os.truncate(self._path, text.rfind(b"\n") + 1)


def replace_file(path: Path, text: str) -> None:
    """Write a file in one rename, so that an interruption leaves it as it was or as it is to be."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or compare it with the existing one; values must survive JSON unchanged.

    Raises:
        ValueError: a value differs.
    """
    if not path.exists():
        replace_file(path, json.dumps(manifest, indent=2))
        return
    found = json.loads(path.read_text())
    for name, value in manifest.items():
        if found.get(name) != value:
            raise ValueError(f"{path.parent} was made with {name} {found.get(name)!r}, this run has {value!r}")
