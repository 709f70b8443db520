"""Reads from the pipes of processes with a deadline: a process that hangs fails its test and not the whole run."""

import queue
import threading
from typing import Any

DEADLINE_S = 120.0
"""Generous, for a machine that runs several tests at once."""


def line_of(stream: Any, within_s: float = DEADLINE_S) -> Any:
    """Next line of the pipe, empty at its end; fails if there is none within `within_s` seconds."""
    lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(stream.readline()), daemon=True).start()
    try:
        return lines.get(timeout=within_s)
    except queue.Empty:
        raise AssertionError(f"no line within {within_s:g} s") from None
