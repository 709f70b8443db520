"""The processes of ranks 1 and up: children of rank 0's process, which end with it however it ends.

A rank that ends is reported with its cause. It knows commands and exit statuses, not what ranks compute.
"""

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from betoken.engine.errors import RankLostError
from betoken.engine.ranks.memory import FILE_VARIABLE, RankMemory

_LOG = logging.getLogger(__name__)

_CAUSE_WAIT_S = 3.0
"""How long a failed exchange waits for the end of the rank that caused it."""
_STORE_TIMEOUT = timedelta(seconds=300)


class RankProcesses:
    """The processes of ranks 1 to `size` - 1 and the store by which all ranks meet."""

    def __init__(
        self, size: int, command: Sequence[str], given: bytes, on_lost: Callable[[RankLostError], None]
    ) -> None:
        """Start them.

        Args:
            given: standard input of each process, which stays open until this process ends.
            on_lost: called on another thread when a process ends before `close`.
        """
        self._size, self._command, self._given, self._on_lost = size, command, given, on_lost
        self.memory = RankMemory.create(size)
        self.store, self._port = _make_store()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._lost: RankLostError | None = None
        self._has_lost = threading.Event()
        for rank in range(1, size):
            # PR_SET_PDEATHSIG means the thread that starts a process: this one lives as long as the process.
            thread = threading.Thread(target=self._run, args=(rank,), name=f"rank-{rank}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, of the processes started so far."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def lost(self) -> RankLostError | None:
        """The error of the first rank that has ended."""
        return self._lost

    def explain(self, error: Exception) -> str:
        """The cause of a failed exchange: a rank that has ended by now or ends soon, or else the error itself."""
        self._has_lost.wait(_CAUSE_WAIT_S)
        return str(self._lost) if self._lost is not None else f"an exchange between ranks failed: {error}"

    def slowest(self) -> str:
        """The rank that has made the fewest exchanges, in words; empty after `close`."""
        if self._is_closed:
            return ""
        counts = self.memory.counts.tolist()
        rank = max(range(self._size), key=lambda each: (-counts[each], each))
        return (
            f"; rank {rank} is the slowest: it has begun {-(-counts[rank] // 2)} exchanges, rank 0 {-(-counts[0] // 2)}"
        )

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for process in list(self._processes.values()):
            with suppress(OSError):
                process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait for the end of each process, at most so long."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self, rank: int) -> None:
        """Start a rank and wait for its end."""
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            FILE_VARIABLE: str(self.memory.file.fileno()),
        }
        process = subprocess.Popen(
            self._command,
            env=environment,
            pass_fds=[self.memory.file.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._processes[rank] = process
        if self._is_closed:
            process.kill()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with suppress(OSError):
            process.stdin.write(self._given)
            process.stdin.flush()
        words = process.stdout.read().decode(errors="replace").strip()
        status = process.wait()
        if not self._is_closed:
            self._report(RankLostError(f"rank {rank}, pid {process.pid}, {_how_it_ended(status, words)}"))

    def _report(self, error: RankLostError) -> None:
        if self._lost is None:
            self._lost = error
            self._has_lost.set()
            _LOG.critical("%s: the worker cannot go on", error)
            self._on_lost(error)


def _make_store() -> tuple[Store, int]:
    """A store that only this machine can reach, and its port; torch would listen on all interfaces."""
    listener = socket.create_server(("127.0.0.1", 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _how_it_ended(status: int, words: str) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}" + (f": {words}" if words else "")
