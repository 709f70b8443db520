"""The conditions of a measurement: processor, cores and whether they may sleep, memory, versions, commit, date.

Loads no framework; versions come from the installed packages' metadata.
"""

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from betoken.rpc.fast_wake import FastWake
from betoken.rpc.settings import ENV_PREFIX

PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "triton")


def num_cores() -> int:
    """Cores this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def describe_hardware() -> dict[str, Any]:
    """Processor name, cores, whether services started here keep them awake, memory in GiB, load average at the time
    of asking, and GPUs, if any.
    """
    gpus = _gpus()
    return ({"gpus": gpus} if gpus else {}) | {
        "processor": _processor(),
        "cores": num_cores(),
        "fast_wake": os.environ.get(f"{ENV_PREFIX}FAST_WAKE") != "off" and FastWake("auto").asks,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def describe_versions() -> dict[str, str]:
    """Python, the packages that decide speed, the commit (`+dirty` when the tree differs from it, "unknown" where this
    code is installed outside its repository) and the date.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "absent"
    versions["commit"] = _commit()
    versions["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    return versions


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Names, by the driver's own tool."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [name.strip() for name in names.splitlines() if name.strip()]


def _commit() -> str:
    here = Path(__file__).parent
    try:
        _git(here, "ls-files", "--error-unmatch", Path(__file__).name)  # else it is another project's repository
        commit = _git(here, "rev-parse", "--short=12", "HEAD")
        return commit + ("+dirty" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
