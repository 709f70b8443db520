"""A forked service behaves like an executed one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from betoken.cli.service_process import service_environment
from tests import fork_server

CHILD = [sys.executable, "-m", "betoken.cli.child"]


def run(start: Any, service: str, *arguments: str, **how: Any) -> tuple[int, str, str]:
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start([*CHILD, service, *arguments], env=service_environment(), text=True, **streams, **how) as process:
        output, errors = process.stdout.read(), process.stderr.read()  # while its input is open
    return process.returncode, output, errors


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--port", "-1"], ["--tokenizer", "missing", "--verify", "127.0.0.1:1"]]
)
def test_a_forked_service_has_the_output_and_status_of_an_executed_one(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BETOKEN_LOG_FORMAT", "json")
    forked, executed = (
        run(start, "betoken.router", *arguments) for start in (fork_server.ForkedPopen, fork_server._executed)
    )
    assert forked[:2] == executed[:2]
    assert len(forked[2].splitlines()) == len(executed[2].splitlines())


def test_a_forked_service_is_a_child_with_its_own_session_and_ends_with_its_input() -> None:
    command = [*CHILD, "betoken.gateway", "--router", "127.0.0.1:1", "--port", "0"]
    streams = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    for end in ("killed", "input"):
        service = fork_server.ForkedPopen(command, env=service_environment(), start_new_session=True, **streams)
        with service:
            assert service.stderr is not None and service.stdin is not None
            assert any(b"serving" in line for line in service.stderr)
            parent = Path(f"/proc/{service.pid}/stat").read_text().rpartition(")")[2].split()[1]
            assert (int(parent), os.getsid(service.pid)) == (os.getpid(), service.pid)
            os.killpg(service.pid, signal.SIGKILL) if end == "killed" else service.stdin.close()
            assert service.wait(30) == (-signal.SIGKILL if end == "killed" else 0)
