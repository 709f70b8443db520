"""Load progress of a service: log lines, a small file next to the ready file, and the error for early calls.

The file `<ready-file>.progress` holds one JSON line {"stage": str, "fraction": float}, replaced atomically.
"""

import json
import logging
import os
from pathlib import Path

from betoken.common.errors import LoadingError
from betoken.rpc.early_end import at_end

logger = logging.getLogger(__name__)

_SUFFIX, _PART = ".progress", ".part"
LONGEST_SUFFIX = _SUFFIX + _PART
"""Longest suffix that is added to a ready file's name."""


class LoadProgress:
    """Call it with a stage and the fraction done, 0 to 1: of the whole start, or of the download while that runs."""

    def __init__(self, ready_file: Path | None) -> None:
        self._path = None if ready_file is None else ready_file.with_name(ready_file.name + _SUFFIX)
        self._is_removed = False
        self.error = LoadingError("starting", 0.0)
        """Status of calls that need the model, while it loads."""
        at_end(self.remove)

    def __call__(self, stage: str, fraction: float) -> None:
        before, self.error = self.error.stage, LoadingError(stage, fraction)
        if stage != before:
            logger.info("loading: %s", stage)
        if self._path is not None and not self._is_removed:
            part = self._path.with_name(self._path.name + _PART)
            part.write_text(json.dumps({"stage": stage, "fraction": round(fraction, 3)}) + "\n")
            os.replace(part, self._path)
            if self._is_removed:  # by the main thread, meanwhile
                self.remove()

    def remove(self) -> None:
        """Remove the file, however far the start is; a thread that still loads does not write it again."""
        self._is_removed = True
        if self._path is not None:
            for path in (self._path.with_name(self._path.name + _PART), self._path):
                path.unlink(missing_ok=True)
