"""The one thread that owns a model.

Work reaches it as calls through an inbox; between calls it steps the core while there is something to do.
It does not know what the core computes, nor who is asking.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What a model thread drives; touched by that thread only."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        ...

    def step(self) -> None:
        """Run one forward and hand out its results; must not raise for a fault of one sequence."""
        ...

    def expire(self, now_s: float) -> float | None:
        """Drop what is past its deadline on the `time.monotonic` clock; return the next deadline, None without one."""
        ...


CoreT = TypeVar("CoreT", bound=Core)


class ModelThread(Generic[CoreT]):
    """Builds a core on a thread of its own and runs it there until stopped."""

    def __init__(self, build: Callable[[], CoreT], name: str) -> None:
        self._build = build
        self._inbox: deque[Callable[[CoreT], None]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._ready: Future[CoreT] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Future[CoreT]:
        """Start loading; the future gives the core (read it, do not call it) or the reason loading failed."""
        self._thread.start()
        return self._ready

    def submit(self, call: Callable[[CoreT], None]) -> None:
        """Run `call(core)` on the thread before its next step; thread-safe, never blocks."""
        with self._wake:
            self._inbox.append(call)
            self._wake.notify()

    def stop(self, timeout_s: float) -> None:
        """Let the current step finish and end the thread."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            core = self._build()
        except BaseException as error:  # loading is allowed to fail in any way; the starter gets the reason
            self._ready.set_exception(error)
            return
        self._ready.set_result(core)
        while not self._is_stopping:
            for call in self._take(core):
                call(core)
            if core.has_work:
                core.step()

    def _take(self, core: CoreT) -> list[Callable[[CoreT], None]]:
        """Everything submitted; waits for something, or for the next deadline, when the core is idle."""
        next_deadline_s = core.expire(time.monotonic())
        with self._wake:
            if not self._inbox and not core.has_work and not self._is_stopping:
                wait_s = None if next_deadline_s is None else max(0.0, next_deadline_s - time.monotonic())
                self._wake.wait(wait_s)
            calls = list(self._inbox)
            self._inbox.clear()
        return calls
