"""Description of the machine in a report."""

import subprocess
from pathlib import Path

import pytest

from betoken.bench import machine
from betoken.rpc import fast_wake


def test_the_commit_is_that_of_this_code_and_of_no_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    installed = tmp_path / "site-packages" / "machine.py"
    installed.parent.mkdir()
    installed.touch()
    git("init")
    git("commit", "--allow-empty", "-m", "another project")
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.describe_versions()["commit"] == "unknown"
    git("add", "site-packages")
    git("commit", "-m", "its own")
    assert len(machine.describe_versions()["commit"]) == 12


@pytest.mark.parametrize(
    ("script", "names"),
    [("echo 'NVIDIA H100 80GB HBM3'; echo NVIDIA L4", ["NVIDIA H100 80GB HBM3", "NVIDIA L4"]), ("exit 9", None)],
)
def test_gpus_are_those_that_the_driver_names(
    script: str, names: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert machine.describe_hardware().get("gpus") == names
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gpus" not in machine.describe_hardware()


def test_the_description_of_a_machine_reports_fast_wake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BETOKEN_FAST_WAKE", raising=False)
    monkeypatch.setattr(fast_wake, "DEVICE", tmp_path / "cpu_dma_latency")
    assert machine.describe_hardware()["fast_wake"] is False
    fast_wake.DEVICE.touch()
    assert machine.describe_hardware()["fast_wake"] is True
    monkeypatch.setenv("BETOKEN_FAST_WAKE", "off")
    assert machine.describe_hardware()["fast_wake"] is False
