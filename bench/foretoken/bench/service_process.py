"""One service as a local process: start, wait until it takes requests, harm, stop.

Knows the services' common command line (`--port`, `--ready-file`) and nothing of what they do.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

STOP_GRACE_S = 15.0
POLL_INTERVAL_S = 0.05


class ServiceError(RuntimeError):
    """A service did not start; the text ends with the last lines of its log."""


class ServiceProcess:
    """A child process running `python -m MODULE`; restarted under the same port."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        self._module = module
        self._arguments = list(arguments)
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="foretoken-")
        self._ready_file = Path(self._folder.name) / "ready.json"
        self.log_file = Path(self._folder.name) / "log"

    @property
    def address(self) -> str:
        """`host:port`, known once started."""
        return f"127.0.0.1:{self._port}"

    def launch(self) -> None:
        """Start the process; `wait_until_ready` tells when it serves."""
        self._ready_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", self._module, *self._arguments]
        command += ["--port", str(self._port), "--ready-file", str(self._ready_file)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
                start_new_session=True,
            )

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the process announces its port.

        Raises:
            ServiceError: it ended, or did not get ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._ready_file.exists():
                    if self._process is None or self._process.poll() is not None:
                        raise ServiceError(f"{self._module} ended while starting\n{self._log_tail()}")
                    await asyncio.sleep(POLL_INTERVAL_S)
        except TimeoutError:
            raise ServiceError(f"{self._module} was not ready within {timeout_s:g} s\n{self._log_tail()}") from None
        self._port = int(json.loads(self._ready_file.read_text())["port"])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """End the process at once, without a chance to clean up."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """Ask the process to drain and end; kill it when it does not."""
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGTERM)
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                await self.kill()
        self._folder.cleanup()

    def _log_tail(self, num_lines: int = 20) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        return "\n".join(lines[-num_lines:])
