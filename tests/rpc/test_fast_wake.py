"""Keeping cores awake: asked for while something is held and not a moment longer, refused by type, never fatal."""

import os
import struct

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.rpc import fast_wake
from betoken.rpc.fast_wake import FastWake


@pytest.fixture
def device(tmp_path):
    path = tmp_path / "cpu_dma_latency"
    path.touch()
    return path


def is_asked(device):
    """Whether this process has the file open, which is what asks."""
    files = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if _exists(number)]
    return str(device) in files


def _exists(number):
    return os.path.lexists(f"/proc/self/fd/{number}")


@pytest.mark.parametrize(("is_virtual", "latency_us"), [(True, 0), (False, 2)])
def test_fast_wake_is_requested_from_the_first_hold_to_the_last_release(device, monkeypatch, is_virtual, latency_us):
    monkeypatch.setattr(fast_wake, "_is_virtual", lambda: is_virtual)
    wake = FastWake("auto", device)
    assert not is_asked(device)
    for _ in range(2):
        wake.hold()
        with wake.held():
            assert is_asked(device) and wake.num_held == 2
        assert is_asked(device)
        assert struct.unpack("=i", device.read_bytes()) == (latency_us,)
        wake.release()
        assert not is_asked(device) and wake.num_held == 0


def test_a_fast_wake_hold_ends_with_failed_work(device):
    wake = FastWake("on", device)
    with pytest.raises(ValueError, match="mine"), wake.held():
        raise ValueError("mine")
    assert not is_asked(device)


def test_fast_wake_off_makes_no_request(device):
    wake = FastWake("off", device)
    with wake.held():
        assert not is_asked(device) and wake.num_held == 1


def test_without_permission_fast_wake_auto_is_disabled_and_on_is_rejected(tmp_path):
    missing = tmp_path / "missing"
    with FastWake("auto", missing).held():
        assert not missing.exists()
    with pytest.raises(FailedPreconditionError, match="--fast-wake on: .*No such file.*missing"):
        FastWake("on", missing)


def test_a_fast_wake_device_that_fails_later_is_logged_once_and_blocks_nothing(device, caplog):
    wake = FastWake("on", device)
    device.unlink()
    for _ in range(2):
        with wake.held():
            assert wake.num_held == 1
    assert caplog.text.count("cores may sleep while requests run") == 1
