"""Files of finished work that survive an interruption: records one a line, and a manifest of what they belong to."""

import json
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
            text = self._path.read_text()
            if text and not text.endswith("\n"):
                self._path.write_text(text[: text.rfind("\n") + 1])


def check_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest, or compare it with the one that is there; values must survive JSON unchanged.

    Raises:
        ValueError: a value differs.
    """
    if not path.exists():
        path.write_text(json.dumps(manifest, indent=2))
        return
    found = json.loads(path.read_text())
    for name, value in manifest.items():
        if found.get(name) != value:
            raise ValueError(f"{path.parent} was made with {name} {found.get(name)!r}, this run has {value!r}")
