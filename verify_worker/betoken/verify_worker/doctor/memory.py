"""Memory that models need, from the headers of their files, compared with free memory. It reads no weights."""

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from betoken.common.gguf import find_gguf, read_header
from betoken.common.model_path import path_fault
from betoken.engine.weights.fingerprint import read_headers
from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

_DENSE = ("F64", "F32", "F16", "BF16")
"""Types that are converted to --dtype at load."""
_CURE = "a smaller or quantised model, --quantize, a smaller --kv-memory-bytes, or more memory"


def weight_bytes(model: str, dtype: str) -> int:
    """Return the bytes of a model's loaded weights; weights of a GGUF file count as stored.

    Raises:
        FileNotFoundError: the model is not on this machine.
        ModelRefusedError, GgufError, OSError: its files cannot be read.
    """
    path = Path(os.path.expanduser(model))
    if not path.exists():
        raise FileNotFoundError(path_fault(model) or "not on this machine: the hub's files are not looked up")
    if (file := find_gguf(path)) is not None:
        return sum(tensor.num_bytes for tensor in read_header(file).tensors)
    size = None if dtype == "auto" else getattr(torch, dtype).itemsize
    tensors = read_headers(path).values()
    return sum(prod(one.shape) * size if size and one.dtype in _DENSE else one.num_bytes for one in tensors)


def model_finding(name: str, model: str, dtype: str) -> tuple[Finding, int]:
    """Return the size of a model's weights as a finding and in bytes, 0 if it is unknown."""
    try:
        size = weight_bytes(model, dtype)
    except FileNotFoundError as fault:
        level = error if path_fault(model) else warning
        return level(name, f"{model}: {fault}", "download it, and name its directory or GGUF file"), 0
    except (ValueError, OSError, RuntimeError) as fault:
        return error(name, f"{model}: {fault}", "download the file again"), 0
    return ok(name, f"{model}: weights of {_gb(size)}"), size


def cpu_memory_finding(
    target_bytes: int, draft_bytes: int, num_ranks: int, kv_memory_bytes: int, free_bytes: int
) -> Finding:
    """Compare free memory with the needs of all ranks, KV included; a rank reads its part of the checkpoint alone."""
    served = target_bytes + draft_bytes + (num_ranks + bool(draft_bytes)) * kv_memory_bytes
    share = -(-target_bytes // num_ranks)
    ranks = f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    text = f"{_gb(free_bytes)} free; {ranks} of {_gb(share)} weights and {_gb(kv_memory_bytes)} KV"
    text += f", draft model {_gb(draft_bytes)}" if draft_bytes else ""
    if served > free_bytes:
        return error("memory", f"{text}: at least {_gb(served)}", _CURE)
    return ok("memory", text)


def gpu_memory_finding(target_bytes: int, draft_bytes: int, free_bytes: Sequence[int]) -> Finding:
    """Compare the free memory of each rank's GPU with its part of the weights.

    Args:
        free_bytes: of the GPU of each rank.
    """
    share, least = -(-target_bytes // len(free_bytes)), min(free_bytes)
    text = f"at least {_gb(least)} free per GPU; {_gb(share)} weights per rank"
    text += f", draft model {_gb(draft_bytes)}" if draft_bytes else ""
    if share >= least:
        return error("memory", text, f"more GPUs (--tensor-parallel), or {_CURE}")
    if share + draft_bytes >= least:
        return warning("memory", text, "the draft model on another GPU")
    return ok("memory", text)


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the memory that new processes can take, the container's limit included; None if it is unknown."""
    found = []
    try:
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stats.get("inactive_file", 0))
            found.append(max(0, int(limit) - used))
    except (OSError, ValueError):  # another system, or version 1 of cgroups
        pass
    return min(found, default=None)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
