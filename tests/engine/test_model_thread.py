"""The model thread: a fault that reaches it is logged, ends it, and is told."""

import time

import pytest

from foretoken.engine.model_thread import ModelThread


class Core:
    def __init__(self):
        self.fault = ""

    @property
    def has_work(self):
        self._maybe_raise("has_work")
        return self.fault == "step"

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
def test_a_fault_ends_the_thread_is_logged_and_told(caplog, where):
    thread = ModelThread(Core, "fragile")
    thread.start().result(30)
    assert not thread.failure.done()
    thread.submit(lambda core: set_fault(core, where))
    error = thread.failure.result(30)
    assert isinstance(error, LookupError) and str(error) == f"no {where} today"
    thread.stop(5)
    assert "the thread fragile ends" in caplog.text and "Traceback" in caplog.text


def test_a_submitted_call_that_raises_ends_the_thread_too():
    thread = ModelThread(Core, "fragile")
    thread.start().result(30)
    thread.submit(lambda core: 1 // 0)
    assert isinstance(thread.failure.result(30), ZeroDivisionError)


def test_a_thread_that_is_stopped_has_not_failed():
    thread = ModelThread(Core, "sound")
    thread.start().result(30)
    started_s = time.monotonic()
    thread.stop(60)
    assert time.monotonic() - started_s < 30 and not thread.failure.done()
