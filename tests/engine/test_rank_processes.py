"""Processes of ranks: the cause of an end is reported, and none outlives the process that started it."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from betoken.engine.errors import RankLostError
from betoken.engine.ranks import processes as processes_module
from betoken.engine.ranks.joining import join
from betoken.engine.ranks.processes import RankProcesses

TIMEOUT_S = 60.0
CHILD = """
import sys, time
from betoken.engine.ranks.parent import end_with_parent
end_with_parent()
sys.stdout.write("ready\\n")
sys.stdout.flush()
time.sleep(600)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child.stdout.readline()
sys.stdout.write(f"{{child.pid}}\\n")
sys.stdout.flush()
time.sleep(600)
"""


def started(program: str) -> tuple[RankProcesses, list[RankLostError], threading.Event]:
    lost: list[RankLostError] = []
    has_lost = threading.Event()

    def on_lost(error: RankLostError) -> None:
        lost.append(error)
        has_lost.set()

    return RankProcesses(2, [sys.executable, "-c", program], b"given\n", on_lost), lost, has_lost


def test_a_rank_that_ends_is_reported_with_its_last_words() -> None:
    program = "import sys; sys.stdout.write(sys.stdin.readline().strip() + ': LookupError'); sys.exit(3)"
    processes, lost, has_lost = started(program)
    assert has_lost.wait(TIMEOUT_S)
    assert str(lost[0]).startswith("rank 1, pid ") and str(lost[0]).endswith("ended with status 3: given: LookupError")
    assert processes.explain(RuntimeError("Connection reset")) == str(lost[0])
    with pytest.raises(RankLostError, match="ended with status 3"):
        join(0, 2, processes.store, torch.device("cpu"), lost=processes.lost)
    processes.close()


def test_a_rank_that_is_killed_is_reported_unless_its_worker_ends() -> None:
    processes, lost, has_lost = started("import sys; sys.stdin.read()")
    deadline_s = time.monotonic() + TIMEOUT_S
    while not processes.pids:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    os.kill(processes.pids[1], signal.SIGKILL)
    assert has_lost.wait(TIMEOUT_S)
    assert f"rank 1, pid {processes.pids[1]}, was ended by SIGKILL" in str(lost[0])
    processes, lost, has_lost = started("import sys; sys.stdin.read()")
    processes.close()
    processes.wait(TIMEOUT_S)
    assert not lost


def test_a_hang_is_reported_with_the_slowest_rank() -> None:
    processes, _, _ = started("import sys; sys.stdin.read()")
    processes.memory.counts[:] = [6, 4]
    assert processes.slowest() == "; rank 1 is the slowest: it has begun 2 exchanges, rank 0 3"
    processes.memory.counts[:] = [5, 5]
    assert processes.slowest().startswith("; rank 1 is the slowest")
    processes.close()


def test_a_rank_that_does_not_join_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("betoken.engine.ranks.joining._JOIN_TIMEOUT_S", 0.1)
    with pytest.raises(RankLostError, match="rank 1, 2 did not join within 0.1 s"):
        join(0, 3, distributed.HashStore(), torch.device("cpu"))


def test_the_store_of_ranks_is_reached_by_its_port() -> None:
    store, port = processes_module._make_store()
    store.set("key", "value")
    other = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    assert other.get("key") == b"value"


def test_a_rank_ends_if_the_process_that_started_it_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.kill()
    parent.wait(TIMEOUT_S)
    readable, _, _ = select.select([watch], [], [], TIMEOUT_S)
    os.close(watch)
    assert readable
