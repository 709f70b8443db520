"""How much a process grows."""

from __future__ import annotations

import re
from pathlib import Path


class Memory:
    """Resident memory of a process, bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")
        (self._folder / "clear_refs").write_text("5")  # the peak is counted anew
        self._before = self._read("VmRSS")

    @property
    def growth(self) -> int:
        """How much it is above what it was first."""
        return self._read("VmRSS") - self._before

    @property
    def peak_growth(self) -> int:
        """How much it was, at most, above what it was first."""
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        found = re.search(rf"{name}:\s*(\d+) kB", (self._folder / "status").read_text())
        assert found is not None
        return int(found[1]) << 10
