"""Services forked from a process that has imported their modules, which takes most of the seconds of a start.

`ForkedPopen` replaces `subprocess.Popen`. Services, started directly or by `LocalServices`, and the baseline of
transformers become children of this process as if executed: with their own session, streams, arguments, environment and
directory.
Other commands are executed, and so are those whose environment differs in a variable that imports may read.
"""

import atexit
import ctypes
import gc
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import Any

SERVICES = [f"betoken.{name}" for name in ("verify_worker", "draft_worker", "router", "gateway")]
ROUTER = "tests.e2e.router_constants"
BASELINE = "betoken.bench.transformers_process"
RUN = [*(f"{name}.__main__" for name in SERVICES), BASELINE]
IMPORTED = [*RUN, *(f"{name}.service" for name in SERVICES[:2]), "transformers.models.llama.modeling_llama"]
READ_LATER = ("BETOKEN_", "GRPC_", "HF_HUB_DISABLE_PROGRESS_BARS", "PYTEST_", "PYTHONUNBUFFERED", "TRANSFORMERS_VERB")
"""Beginnings of the variables that imports do not read, or that affect neither results nor logs of services."""
_PR_SET_CHILD_SUBREAPER = 36
_MAX_BYTES = 1 << 17
_executed: Any = subprocess.Popen


class ForkServer:
    """The process that forks, started by the first command for it; may be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}
        self._prctl = ctypes.CDLL(None).prctl

    def fork(self, request: dict[str, Any], streams: list[int]) -> int | None:
        """Process id of the command as a child of this process; None if its environment is another."""
        with self._lock:
            if self._channel is None:
                self._start(request["environment"])
            if imported_with(request["environment"]) != self._environment:
                return None
            self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # processes orphaned meanwhile become children
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
                return int(self._channel.recv(_MAX_BYTES))
            finally:
                self._prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _start(self, environment: Mapping[str, str]) -> None:
        self._environment = imported_with(environment)
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            number, environment = other.fileno(), {**environment, "PYTHONUNBUFFERED": "1"}
            process = _executed([sys.executable, __file__, str(number)], pass_fds=[number], env=environment)
        atexit.register(process.wait)
        atexit.register(self._channel.close)


def imported_with(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATER)}


class ForkedPopen(subprocess.Popen):
    """`subprocess.Popen` with the server for its commands."""

    _server = ForkServer()

    def _execute_child(self, *arguments: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(start).bind(*arguments).arguments
        match given["args"]:
            case [sys.executable, "-m", "betoken.cli.child", service, *_]:
                is_forked = service in (*SERVICES, ROUTER)
            case [sys.executable, "-m", module, *_]:
                is_forked = module in (*SERVICES, BASELINE)
            case _:
                is_forked = False
        environment = dict(os.environ if given["env"] is None else given["env"])
        request = {"command": given["args"], "environment": environment, "is_leader": given["start_new_session"]}
        pipes = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        streams = [number if pipe == -1 else pipe for number, pipe in enumerate(pipes)]
        if not is_forked or (pid := self._server.fork(request | {"directory": os.getcwd()}, streams)) is None:
            return start(*arguments)
        self.pid, self._child_created = pid, True
        self._close_pipe_fds(*arguments[10:16])  # type: ignore[attr-defined]


def serve(channel: socket.socket) -> dict[str, Any]:
    """Fork for each request; return the request in the forked process only."""
    while data := (received := socket.recv_fds(channel, _MAX_BYTES, 3))[0]:
        read, write = os.pipe()
        if not (between := os.fork()):
            if not (pid := os.fork()):
                channel.close()
                return {**json.loads(data), "streams": received[1], "others": (read, write, *received[1])}
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # first: its end gives the forked process its new parent
        channel.send(os.read(read, 32))
        for number in (read, write, *received[1]):
            os.close(number)
    os._exit(0)


def become(request: dict[str, Any]) -> None:
    """Run the request's module as `python -m` would in a new process."""
    if request["is_leader"]:
        os.setsid()
    for target, number in enumerate(request["streams"]):
        os.dup2(number, target)
    for number in request["others"]:
        os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    sys.path[0] = request["directory"]
    sys.argv = request["command"][2:]
    runpy._run_module_as_main(sys.argv[0])  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.path.pop(0)
    for name in IMPORTED:
        import_module(name)
    for name in RUN:
        del sys.modules[name]  # each is the forked process's `__main__`
    gc.collect()
    gc.freeze()
    sys.path.insert(0, "")
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
