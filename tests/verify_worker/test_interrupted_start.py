"""A worker that is stopped while it compiles ends at once and leaves no files behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engine.tiny import save_tiny

COMPILER = """#!/bin/sh
for made; do
    case "$last" in -o) echo $$ > "$STARTED.part"; mv "$STARTED.part" "$STARTED"; exec sleep 120;; esac
    last=$made
done
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_an_interrupted_start_leaves_no_processes_or_files(number: signal.Signals, status: int, tmp_path: Path) -> None:
    compiler, started, temporary = tmp_path / "compiler", tmp_path / "started", tmp_path / "temporary"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    temporary.mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)  # so that code is kept in the folder of temporary files
    ready = tmp_path / "run" / "ready"
    ready.parent.mkdir()
    command = [sys.executable, "-m", "betoken.verify_worker", "--model", str(save_tiny(tmp_path / "m", "llama"))]
    command += ["--cache-dir", str(tmp_path / "cache"), "--port", "0", "--ready-file", str(ready)]
    tools = {"CC": str(compiler), "CXX": str(compiler), "STARTED": str(started), "TMPDIR": str(temporary)}
    with subprocess.Popen(command, env=os.environ | tools, stderr=subprocess.PIPE, text=True) as worker:
        try:
            while not started.exists():  # the test's own deadline is the limit
                assert worker.poll() is None, worker.stderr.read()
                time.sleep(0.05)
            assert list(temporary.iterdir()) and list(ready.parent.iterdir()), "there is something to leave"
            worker.send_signal(number)
            assert worker.wait(120) == status
        finally:
            worker.kill()  # or leaving the block would wait for a worker that does not end
    assert list(temporary.iterdir()) == []
    assert list(ready.parent.iterdir()) == []
    assert ends(int(started.read_text()))


def ends(pid: int, within_s: float = 30.0) -> bool:
    """Whether the process ends in time; an ended process may wait for its new parent."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False
