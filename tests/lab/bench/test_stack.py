"""A stack whose start is interrupted."""

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from betoken.bench.stack import Stack
from betoken.cli import local_services
from betoken.cli.local_services import LocalServicesConfig


def until_begun(stack: Stack) -> None:
    while "draft" not in stack.services.services:
        time.sleep(0.01)


async def test_a_cancelled_start_of_a_stack_ends_at_once_and_leaves_no_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_service.py").write_text("import time\ntime.sleep(120)\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    for name in ("VERIFY_MODULE", "DRAFT_MODULE", "ROUTER_MODULE"):
        monkeypatch.setattr(local_services, name, "slow_service")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    stack = Stack(LocalServicesConfig("t"))
    starting = asyncio.ensure_future(stack.__aenter__())
    await asyncio.to_thread(until_begun, stack)
    begun_s = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(service.is_running for service in stack.services.services.values())
    assert list(temporary.iterdir()) == [] and time.monotonic() - begun_s < 30.0
