"""Runs the files of this folder in a separate process, in which Triton interprets its kernels on CPU tensors.

Triton decides when a kernel is decorated, so the process that runs the other tests cannot switch. That process sends
each file's selected tests to a child with TRITON_INTERPRET=1 and reports each outcome as its own. Tests marked `gpu`
stay in it: there the same kernels run compiled. A test takes the fixture `device`, and `takes_triton` around what it
tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from betoken.bench.gpu.poison import poisoned
from betoken.kernels import dispatch

HERE = Path(__file__).parent
IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if IS_INTERPRETING:
    from tests.kernels.interpreted import fixed_order, patched_once

    fixed_order.install()
    patched_once.install()


class Child:
    """The interpreting process, and what it has reported so far of the file it was sent last, by test."""

    def __init__(self, config: pytest.Config) -> None:
        self.path = Path()
        self._config = config
        self._complaints = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py")],
            cwd=config.rootpath,
            env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
        )
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._arguments: Any = None
        self.is_running = False

    def run(self, path: Path, items: list[pytest.Item]) -> None:
        """Send the tests of one file."""
        assert self._process.stdin is not None
        self.path, self.is_running = path, True
        self._arguments = tempfile.NamedTemporaryFile("w", suffix=".txt")
        self._arguments.write("\n".join(item.nodeid for item in items))
        self._arguments.flush()
        self._process.stdin.write(f"{self._arguments.name}\n")
        self._process.stdin.flush()

    def has_finished(self) -> bool:
        """Whether another file may be sent; waits for the end if all reports were read."""
        return not self.is_running or (not self._reports and self._read() is None and self._process.poll() is None)

    def reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        """Waits for the test's reports; a failure report if the child has none."""
        while not any(report.when == "teardown" for report in self._reports.get(item.nodeid, ())):
            report = self._read() if self.is_running else None
            if report is None:
                return [*self._reports.pop(item.nodeid, ()), self._lost(item)]
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # a skip's (path, line, reason), which JSON made a list
            self._reports.setdefault(report.nodeid, []).append(report)
        return self._reports.pop(item.nodeid)

    def _read(self) -> Any:
        """The next report; None after the last of a file, or of the process."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
        data = json.loads(line or "null")
        self.is_running = data is not None
        return data and self._config.hook.pytest_report_from_serializable(config=self._config, data=data)

    def _lost(self, item: pytest.Item) -> pytest.TestReport:
        self._complaints.seek(0)
        text = f"the interpreting process reports nothing: {self._process.poll()}\n{self._complaints.read()[-4000:]}"
        return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), "failed", text, "call")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._complaints.close()


CHILD = pytest.StashKey[Child]()


def is_delegated(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE) and item.get_closest_marker("gpu") is None


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Reports what the child found instead of running the test here."""
    if IS_INTERPRETING or not is_delegated(item):
        return None
    config = item.config
    child = config.stash.get(CHILD, None)
    if child is None or child.path != item.path:
        if child is not None and not child.has_finished():
            child.stop()
            child = None
        child = config.stash[CHILD] = child or Child(config)
        child.run(item.path, [one for one in item.session.items if one.path == item.path and is_delegated(one)])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in child.reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # the last test run here left open what it shares with this one
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if CHILD in config.stash:
        config.stash[CHILD].stop()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The interpreter's device, and the device for which kernels are compiled."""
    return torch.device(request.param)


@pytest.fixture
def takes_triton() -> Callable[[], AbstractContextManager[None]]:
    """A block in which every op must take its Triton path and finds new tensors filled with NaN or -7."""

    @contextmanager
    def block() -> Iterator[None]:
        with poisoned(), dispatch.override("triton"), dispatch.recording() as taken:
            yield
        assert set(taken) == {"triton"}

    return block
