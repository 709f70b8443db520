"""Clean-up callbacks for a service that stops before or after it started serving.

Each maker says how to undo its own part.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_undoings: list[Callable[[], None]] = []


def at_end(undo: Callable[[], None]) -> None:
    """Have `undo` called once when the service ends, by a signal while it starts too: no locks, no waiting."""
    _undoings.append(undo)


@contextmanager
def undone_at_end() -> Iterator[None]:
    """At the end of the block, and at a SIGTERM before another handler takes its place, what began in it is undone."""
    is_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    others, _undoings[:] = _undoings[:], []
    before = signal.signal(signal.SIGTERM, _end) if is_main else None
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
        undo_all()
        _undoings[:] = others


def undo_all() -> None:
    """Run the callbacks registered with `at_end` so far."""
    while _undoings:
        with suppress(Exception):
            _undoings.pop()()


def _end(number: int, frame: FrameType | None) -> None:
    """The process ends as the signal itself would have ended it."""
    undo_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
