"""The model thread: a fault that reaches it is logged, ends it, and is reported."""

import asyncio
import atexit
import os
import subprocess
import sys
import threading
import time

import pytest

from betoken.engine import model_thread
from betoken.engine.model_thread import ModelThread


class Core:
    def __init__(self):
        self.fault = ""

    @property
    def has_work(self):
        self._maybe_raise("has_work")
        return self.fault == "step"

    def apply(self, command):
        command(self)

    def step(self):
        self._maybe_raise("step")

    def expire(self, now_s):
        self._maybe_raise("expire")

    def _maybe_raise(self, where):
        if self.fault == where:
            raise LookupError(f"no {where} today")


def set_fault(core, where):
    core.fault = where


@pytest.mark.parametrize("where", ["has_work", "step", "expire"])
def test_a_fault_ends_the_model_thread_is_logged_and_reported(caplog, where):
    thread = ModelThread(Core, "fragile")
    thread.start().result(30)
    assert not thread.failure.done()
    thread.submit([lambda core: set_fault(core, where)])
    error = thread.failure.result(30)
    assert isinstance(error, LookupError) and str(error) == f"no {where} today"
    thread.stop(5)
    assert "the thread fragile ends" in caplog.text and "Traceback" in caplog.text


def test_a_submitted_command_that_raises_ends_the_model_thread_too():
    thread = ModelThread(Core, "fragile")
    thread.start().result(30)
    thread.submit([lambda core: 1 // 0])
    assert isinstance(thread.failure.result(30), ZeroDivisionError)


def test_a_stopped_model_thread_has_not_failed():
    thread = ModelThread(Core, "sound")
    thread.start().result(30)
    started_s = time.monotonic()
    thread.stop(60)
    assert time.monotonic() - started_s < 30 and not thread.failure.done()


class BusyCore(Core):
    """Has always something to do."""

    has_work = True

    def step(self):
        time.sleep(0.01)


@pytest.mark.parametrize("core", [Core, BusyCore])
async def test_neither_idle_nor_busy_model_threads_are_given_up(core):
    thread = ModelThread(core, "sound")
    thread.start().result(30)
    async with thread.running(watchdog_timeout_s=0.5) as failure:
        await asyncio.sleep(1.2)
        assert not failure.done()
    assert not thread.failure.done()


async def test_a_command_that_hangs_is_given_up_and_cut_off_at_the_exit(caplog, monkeypatch):
    release, at_exit, statuses = threading.Event(), [], []
    monkeypatch.setattr(model_thread, "_STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(os, "_exit", statuses.append)
    thread = ModelThread(Core, "stuck")
    thread.explain_hang = lambda: "; rank 1 is the slowest"
    thread.start().result(30)
    async with asyncio.timeout(60), thread.running(watchdog_timeout_s=0.2) as failure:
        thread.submit([lambda core: release.wait()])
        assert isinstance(await failure, TimeoutError)
    assert "the thread stuck is given up: a step has taken 0.2 s; rank 1 is the slowest" in caplog.text
    (cut_off,) = at_exit
    cut_off()
    assert statuses == [1]
    release.set()
    thread.stop(60)
    cut_off()
    assert statuses == [1], "it ended after all"


async def test_a_model_thread_that_ended_by_a_fault_is_not_given_up_too(caplog, monkeypatch):
    monkeypatch.setattr(atexit, "register", lambda call: pytest.fail("the thread has ended"))
    thread = ModelThread(Core, "fragile")
    thread.start().result(30)
    async with asyncio.timeout(60), thread.running(watchdog_timeout_s=0.2) as failure:
        thread.submit([lambda core: 1 // 0])
        assert isinstance(await failure, ZeroDivisionError)
        await asyncio.sleep(0.5)
    assert "given up" not in caplog.text


_STOPPED_DURING_A_STEP = """
import asyncio, sys
import torch
from betoken.engine import model_thread

model_thread._STOP_TIMEOUT_S = 0.2

class Core:
    has_work = True

    def expire(self, now_s): ...

    def step(self):
        while True:
            torch.ones(64, 64) @ torch.ones(64, 64)

async def serve():
    thread = model_thread.ModelThread(Core, "long")
    await asyncio.wrap_future(thread.start())
    async with thread.running(watchdog_timeout_s=300.0):
        pass

asyncio.run(serve())
print("stopped", flush=True)
sys.exit(0)
"""


def test_a_process_that_stops_during_a_long_step_does_not_abort():
    done = subprocess.run([sys.executable, "-c", _STOPPED_DURING_A_STEP], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (1, "stopped\n", "")
