"""The store by which ranks meet that a launcher such as `torchrun` has started, on one machine or several.

The launcher or rank 0 serves it at MASTER_ADDR and MASTER_PORT. Ranks also leave the cause of their end there.
"""

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from betoken.engine.errors import RankLostError

_TIMEOUT = timedelta(seconds=300)
_CAUSE_WAIT_S = 3.0
"""How long a failed exchange waits for the report of the rank that caused it."""
_POLL_S = 0.05
_LOST, _ENDED = "lost", "ended"


class LaunchedStore:
    """The store of one start of all ranks."""

    def __init__(self, rank: int) -> None:
        master, port = _resolved(os.environ["MASTER_ADDR"]), int(os.environ["MASTER_PORT"])
        store = _connect(master, port, is_host=rank == 0 and not _launcher_hosts())
        run, start = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
        self.store: Store = PrefixStore(f"betoken/{run}/{start}", store)
        self.address = _own_address(master, port)
        """Address of this machine on its route to the store."""

    def lost(self) -> RankLostError | None:
        """The error of the first rank that has reported its end."""
        with suppress(RuntimeError):
            if self.store.check([_LOST]):
                return RankLostError(self.store.get(_LOST).decode(errors="replace"))
        return RankLostError("rank 0 has ended") if self.has_ended() else None

    def explain(self, error: Exception) -> str:
        """The cause of a failed exchange: a rank that has reported its end or does so soon, or else the error itself.
        A killed rank reports nothing."""
        deadline_s = time.monotonic() + _CAUSE_WAIT_S
        while time.monotonic() < deadline_s and not self.has_ended():
            if (lost := self.lost()) is not None:
                return str(lost)
            time.sleep(_POLL_S)
        return f"an exchange between ranks failed: {error}"

    def report(self, cause: str) -> None:
        """Report the end of a rank."""
        with suppress(RuntimeError):
            self.store.set(_LOST, cause)

    def announce_end(self) -> None:
        """Report that rank 0 ends, so that the others end without an error."""
        self.store.set(_ENDED, "")

    def has_ended(self) -> bool:
        """Whether rank 0 has announced its end, or its store has ended with it."""
        try:
            return self.store.check([_ENDED])
        except RuntimeError:
            return True


def _resolved(master: str) -> str:
    """The address of a host, whose name may become known only after the processes have started."""
    deadline_s = time.monotonic() + _TIMEOUT.total_seconds()
    while True:
        try:
            return socket.gethostbyname(master)
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RankLostError(f"MASTER_ADDR = {master}: {error}") from error
        time.sleep(_POLL_S)


def _launcher_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect(master: str, port: int, is_host: bool) -> Store:
    if not is_host:
        return TCPStore(master, port, is_master=False, timeout=_TIMEOUT)
    listener = socket.create_server((master, port))  # torch would listen on all interfaces
    return TCPStore(
        master, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT, master_listen_fd=listener.detach()
    )


def _own_address(master: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, port))  # sends nothing
        address: str = probe.getsockname()[0]
    return address
