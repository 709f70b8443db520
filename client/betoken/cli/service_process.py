"""One service as a child process: started, watched until it serves, stopped, killed, started again on the same port.

Knows the options every service shares (`--port`, `--ready-file`) and nothing of what a service does.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LOG_TAIL_LINES = 12
_SERVICE_DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # Two processes of busy OpenMP threads on one machine spin against each other.
    "OMP_WAIT_POLICY": "PASSIVE",
    # gRPC then polls its connections in the thread that waits for them: two thread switches fewer per message.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
}
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class ServiceFailedError(RuntimeError):
    """A service ended, or did not come to serve in time. The text names it and ends with its last log lines."""

    def __init__(self, name: str, what: str, log_tail: str) -> None:
        super().__init__(f"{name} {what}" + (f"; its last words:\n{log_tail}" if log_tail else ""))
        self.name = name
        """The service's name."""
        self.log_tail = log_tail
        """The last lines of its log."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a service has come with starting."""

    stage: str
    """Current stage, e.g. "loading weights"."""
    fraction: float
    """Done of the whole start, 0 to 1; of the download while that runs."""


class ServiceProcess:
    """A service `python -m <module> <arguments>`; its output goes to `<directory>/<name>.log`."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        directory: Path,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """`port` 0: any free one, kept when the service is started again."""
        self.name = name
        self.host = host
        self.port = port
        """0 until the service is ready."""
        self.log_file = directory / f"{name}.log"
        self._ready_file = directory / f"{name}.ready"
        self._progress_file = directory / f"{name}.ready.progress"
        self._module = module
        self._arguments = tuple(arguments)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        self._is_group_ended = False

    @property
    def address(self) -> str:
        """`host:port` or `unix:/path` to reach it at from this machine; good once the service is ready."""
        if self.host.startswith("unix:"):
            return self.host
        host = _LOOPBACK.get(self.host.strip("[]"), self.host.strip("[]"))
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the last start.

        Raises:
            RuntimeError: it was never started.
        """
        if self._process is None:
            raise RuntimeError(f"{self.name} was never started")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def was_stopped(self) -> bool:
        """Whether it exited with status 0, as services do on request."""
        return self._process is not None and self._process.poll() == 0

    def start(self) -> None:
        """Starts the process; `is_ready` says when it serves.

        Raises:
            RuntimeError: it runs already.
        """
        if self.is_running:
            raise RuntimeError(f"{self.name} runs already")
        for file in (self._ready_file, self._progress_file):
            file.unlink(missing_ok=True)
        self._is_group_ended = False
        command = [sys.executable, "-m", "betoken.cli.child", self._module, *self._arguments]
        command += ["--host", self.host, "--port", str(self.port), "--ready-file", str(self._ready_file)]
        with self.log_file.open("ab") as log:
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # closes with this process, which the child takes as its own end
                stdout=log,
                stderr=subprocess.STDOUT,
                env=service_environment(),
                start_new_session=True,  # Ctrl-C in a terminal reaches the parent only, which stops all in order
            )

    def is_ready(self) -> bool:
        """Whether it serves; sets `port`.

        Raises:
            ServiceFailedError: it ended instead.
        """
        ready = _read_json(self._ready_file)
        if ready is not None and self.is_running:
            self.port = int(ready["port"])
            return True
        self.check()
        return False

    def check(self) -> None:
        """Raises:
        ServiceFailedError: the process was started and has ended.
        """
        if self._process is not None and not self.is_running:
            self._end_group()
            raise ServiceFailedError(self.name, _how_it_ended(self._process.returncode), self.log_tail())

    def progress(self) -> Progress | None:
        """Start-up progress, if the service reports it."""
        state = _read_json(self._progress_file)
        return None if state is None else Progress(str(state["stage"]), float(state["fraction"]))

    def log_tail(self, num_lines: int = _LOG_TAIL_LINES) -> str:
        """The last lines of the log since the last start; a kept log holds earlier runs, too."""
        with suppress(OSError), self.log_file.open("rb") as log:
            log.seek(self._log_begin)
            lines = log.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-num_lines:])
        return ""

    def terminate(self) -> None:
        """Asks the process to end (SIGTERM); does not wait."""
        if self.is_running:
            self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; returns whether it came."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends the process and what it started at once (SIGKILL), as a crash would."""
        if self._process is None:
            return
        self._end_group()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for file in (self._ready_file, self._progress_file):
            file.unlink(missing_ok=True)

    def pause(self) -> None:
        """Suspends the process (SIGSTOP), like a hang."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on (SIGCONT)."""
        self._signal(signal.SIGCONT)

    def _end_group(self) -> None:
        """Once, as soon as an end is noticed: later the group's number may belong to another process."""
        if not self._is_group_ended:
            self._is_group_ended = True
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group when ending it by force, else to the process alone."""
        with suppress(ProcessLookupError):
            if number is signal.SIGTERM:
                os.kill(self.pid, number)
            else:
                os.killpg(self.pid, number)


def service_environment() -> dict[str, str]:
    """This process's environment as a service should see it."""
    return {**_SERVICE_DEFAULTS, **os.environ}


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in `file`; None while there is none. Files are replaced atomically, never half written."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _how_it_ended(return_code: int) -> str:
    if return_code < 0:
        return f"was ended by {signal.Signals(-return_code).name}"
    return f"ended with exit status {return_code}"
