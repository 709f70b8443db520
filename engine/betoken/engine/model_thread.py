"""The one thread that owns a model.

Work reaches it through an inbox of commands, which the core applies; between them the core steps while there is
something to do. It does not know what commands say, what the core computes, nor who is asking.
"""

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0
_STOP_TIMEOUT_S = 3.0
"""For the step under way when the thread is to end."""
_WATCH_TICK_S = 1.0


CommandT = TypeVar("CommandT")
_AppliedT = TypeVar("_AppliedT", contravariant=True)


class Core(Protocol[_AppliedT]):
    """The work of a model thread; touched by that thread only."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        ...

    def apply(self, command: _AppliedT) -> None:
        """Do what a command says; must not raise for a fault of one sequence."""
        ...

    def step(self) -> None:
        """Run one forward and hand out its results; must not raise for a fault of one sequence."""
        ...

    def expire(self, now_s: float) -> float | None:
        """Drop what is past its deadline on the `time.monotonic` clock; return the next deadline, None without one."""
        ...


class ModelThread(Generic[CommandT]):
    """Builds a core on a dedicated thread and runs it there until stopped."""

    def __init__(self, build: Callable[[], Core[CommandT]], name: str) -> None:
        self.failure: Future[BaseException] = Future()
        """Done once a command or a step has raised, or taken too long: the thread does nothing more."""
        self.explain_hang: Callable[[], str] = lambda: ""
        """Returns more about a step that takes too long, for the log; called on another thread."""
        self._build = build
        self._inbox: SimpleQueue[Sequence[CommandT]] = SimpleQueue()
        self._is_stopping = False
        self._is_waiting = False
        """Whether there is nothing to do."""
        self._num_turns = 0
        """Begun so far, of commands and a step each."""
        self._ready: Future[Core[CommandT]] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Future[Core[CommandT]]:
        """Start loading; the future gives the core (read it, do not call it) or the reason loading failed."""
        self._thread.start()
        return self._ready

    def submit(self, commands: Sequence[CommandT]) -> None:
        """Have commands applied, in order, before the core's next step; thread-safe, never blocks."""
        self._inbox.put(commands)

    def stop(self, timeout_s: float) -> None:
        """Let the current step finish and end the thread."""
        self._is_stopping = True
        self._inbox.put(())  # wakes it
        self._thread.join(timeout_s)

    @asynccontextmanager
    async def running(self, watchdog_timeout_s: float) -> AsyncIterator[asyncio.Future[BaseException]]:
        """While what is loaded serves; gives `failure`, for this event loop, and stops the thread at the end.

        A step, with the commands before it, that takes longer than `watchdog_timeout_s` is a failure, too. A step that
        still goes on some seconds after the end is cut off when the process exits, with status 1.
        """
        watchdog = asyncio.create_task(self._watch(watchdog_timeout_s))
        try:
            yield asyncio.wrap_future(self.failure)
        finally:
            watchdog.cancel()
            await asyncio.to_thread(self.stop, _STOP_TIMEOUT_S)
            if self._thread.is_alive():
                atexit.register(self._cut_off)

    def _cut_off(self) -> None:
        """End the process around a hanging step. Torn down within foreign code the thread would abort it, and a hanging
        device may block the rest of the exit."""
        if self._thread.is_alive():
            os._exit(1)

    async def _watch(self, timeout_s: float) -> None:
        tick_s = min(_WATCH_TICK_S, timeout_s / 4)
        num_turns, stuck_s = 0, 0.0
        while stuck_s < timeout_s:  # counted in ticks, so that a machine that stood still counts as no hang
            await asyncio.sleep(tick_s)
            if self.failure.done():
                return
            is_stuck = self._num_turns == num_turns and not self._is_waiting
            num_turns, stuck_s = self._num_turns, stuck_s + tick_s if is_stuck else 0.0
        text = f"a step has taken {timeout_s:g} s{self.explain_hang()}"
        logger.critical("the thread %s is given up: %s", self._thread.name, text)
        self.fail(TimeoutError(text))

    def fail(self, error: BaseException) -> None:
        """Report that the thread cannot go on; thread-safe. Only the first report counts."""
        with suppress(InvalidStateError):  # it was given up before
            self.failure.set_result(error)

    def _run(self) -> None:
        try:
            core = self._build()
        except BaseException as error:  # loading is allowed to fail in any way; the starter gets the reason
            self._ready.set_exception(error)
            return
        self._ready.set_result(core)
        try:
            self._serve(core)
        except BaseException as error:  # a core half way through a step cannot go on
            logger.critical("the thread %s ends", self._thread.name, exc_info=True)
            self.fail(error)

    def _serve(self, core: Core[CommandT]) -> None:
        while not self._is_stopping:
            self._num_turns += 1
            next_deadline_s = core.expire(time.monotonic())
            self._apply_submitted(core, next_deadline_s)
            if core.has_work:
                core.step()

    def _apply_submitted(self, core: Core[CommandT], next_deadline_s: float | None) -> None:
        """Apply what was submitted so far; when the core is idle, wait for something, or for the next deadline."""
        try:
            if not core.has_work:
                # Further away than a thread can wait, a deadline is looked at again before it comes.
                left_s = None if next_deadline_s is None else max(0.0, next_deadline_s - time.monotonic())
                wait_s = None if left_s is None else min(left_s, _LONGEST_WAIT_S)
                self._is_waiting = True
                try:
                    commands = self._inbox.get(timeout=wait_s)
                finally:
                    self._is_waiting = False
                for command in commands:
                    core.apply(command)
            for _ in range(self._inbox.qsize()):
                for command in self._inbox.get_nowait():
                    core.apply(command)
        except Empty:
            pass
