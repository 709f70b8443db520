"""While work is held, Linux wakes idle cores at once: a round hands over between processes and threads a dozen times.

Asks by PM QoS, for as long as a file is open, so that nothing stays asked for when a process dies. Knows no service.
Source: "PM Quality Of Service Interface" in the Linux kernel's documentation, `/dev/cpu_dma_latency`.
"""

import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from betoken.common.errors import FailedPreconditionError

_log = logging.getLogger(__name__)

DEVICE = Path("/dev/cpu_dma_latency")
_VIRTUAL_MACHINE_US = 0
"""Cores poll: in a virtual machine even the lightest sleep is left through the hypervisor."""
_BARE_METAL_US = 2
"""Cores sleep lightly (C1), which leaves busy ones their power; waking from deep sleep takes some hundred."""


class FastWake:
    """The file held open asks for fast waking of the whole machine's cores. Used by one thread; counts."""

    def __init__(self, wanted: Literal["auto", "on", "off"] = "off", device: Path | None = None) -> None:
        """`wanted`: "auto" requests it if this process is allowed to, "off" never. `device`: default: `DEVICE`.

        Raises:
            FailedPreconditionError: it is "on", and this process may not ask.
        """
        self._device = device or DEVICE
        self.num_held = 0
        """How often `hold` was called without its `release`."""
        self._file: int | None = None
        self._request = struct.pack("=i", _VIRTUAL_MACHINE_US if _is_virtual() else _BARE_METAL_US)
        self.asks = wanted != "off"
        """Whether `hold` asks for anything."""
        if self.asks and (error := self._refusal()) is not None:
            self.asks = False
            if wanted == "on":
                raise FailedPreconditionError(f"--fast-wake on: {error}") from error
            _log.debug("cores may sleep while requests run: %s", error)

    def hold(self) -> None:
        """Ask until `release` has been called as often as this."""
        self.num_held += 1
        if self.num_held == 1 and self.asks:
            self._ask()

    def release(self) -> None:
        """Undo one `hold`."""
        self.num_held -= 1
        if self.num_held == 0 and self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """`hold`, and `release` in the end."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def _refusal(self) -> OSError | None:
        """Why it may not ask; None if it is allowed."""
        try:
            os.close(self._open())  # which alone asks for nothing
        except OSError as error:
            return error
        return None

    def _open(self) -> int:
        return os.open(self._device, os.O_WRONLY)

    def _ask(self) -> None:
        try:
            self._file = self._open()
            os.write(self._file, self._request)
        except OSError as error:  # slower, but nothing is wrong
            _log.warning("cores may sleep while requests run: %s", error)
            self.asks = False


def _is_virtual() -> bool:
    try:
        return " hypervisor" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
