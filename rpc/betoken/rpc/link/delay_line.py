"""Delays calls by a fixed time and keeps their order: the simulated link of a synthetic worker."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec

P = ParamSpec("P")


def delayed(function: Callable[P, None], delay_s: float) -> Callable[P, None]:
    """Return a function that calls `function` after `delay_s`, in order, on one thread; itself without a delay."""
    return _DelayLine(function, delay_s) if delay_s > 0 else function


class _DelayLine(Generic[P]):
    """Calls that are on the way; thread-safe, never blocks."""

    def __init__(self, function: Callable[P, None], delay_s: float) -> None:
        self._function = function
        self._delay_s = delay_s
        self._calls: SimpleQueue[tuple[float, tuple[Any, ...], dict[str, Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="synthetic-link", daemon=True).start()

    def __call__(self, *args: P.args, **named: P.kwargs) -> None:
        self._calls.put((time.perf_counter() + self._delay_s, args, named))

    def _run(self) -> None:
        while True:
            due_s, args, named = self._calls.get()
            if (left_s := due_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            self._function(*args, **named)
