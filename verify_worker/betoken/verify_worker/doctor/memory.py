"""Memory that models need, from the headers of their files, compared with free memory. It reads no weights."""

import os
import re
from collections.abc import Sequence
from math import prod
from pathlib import Path

import torch

from betoken.common.economy.model_shape import read_sizes
from betoken.common.errors import InvalidArgumentError
from betoken.common.gguf import find_gguf, read_header
from betoken.common.model_path import path_fault
from betoken.engine.ranks.stages import layers_of_stage
from betoken.engine.weights.fingerprint import read_headers
from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

_DENSE = ("F64", "F32", "F16", "BF16")
"""Types that are converted to --dtype at load."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|blk)\.(\d+)\.")
_EMBEDDING = re.compile(r"embed_tokens|word_embeddings|token_embd|(?:^|\.)(?:wte|wpe|embeddings?)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
_CURE = "a smaller or quantised model, --quantize, a smaller --kv-memory-bytes, or more memory"


def weight_bytes(model: str, dtype: str) -> int:
    """Return the bytes of a model's loaded weights; weights of a GGUF file count as stored.

    Raises:
        FileNotFoundError: the model is not on this machine.
        ModelRefusedError, GgufError, OSError: its files cannot be read.
    """
    return sum(_tensor_bytes(model, dtype).values())


def stage_bytes(model: str, dtype: str, num_stages: int) -> list[int]:
    """Return the bytes of each stage's weights in the order of the layers; a tied embedding counts in both ends.

    Raises:
        InvalidArgumentError, ModelRefusedError: the number of layers is unknown, or below that of stages.
        FileNotFoundError, GgufError, OSError: see `weight_bytes`.
    """
    num_layers = read_sizes(model).get("num_hidden_layers")
    if type(num_layers) is not int or num_layers < 1:
        raise InvalidArgumentError(
            "model", model, f"must have num_hidden_layers, an integer above 0, not {num_layers!r}"
        )
    stages = [layers_of_stage(stage, num_stages, num_layers) for stage in range(num_stages)]
    found, embedding, is_tied = [0] * num_stages, 0, True
    for name, num_bytes in _tensor_bytes(model, dtype).items():
        layer = _LAYER.search(name)
        if layer is not None:
            number = int(layer[1])
            found[next((stage for stage, own in enumerate(stages) if number in own), -1)] += num_bytes
        elif _EMBEDDING.search(name):
            embedding += num_bytes
        else:
            is_tied = is_tied and not _HEAD.search(name)
            found[-1] += num_bytes
    found[0] += embedding
    found[-1] += embedding if is_tied and num_stages > 1 else 0
    return found


def _tensor_bytes(model: str, dtype: str) -> dict[str, int]:
    """Bytes of each loaded weight by its name in the checkpoint."""
    path = Path(os.path.expanduser(model))
    if not path.exists():
        raise FileNotFoundError(path_fault(model) or "not on this machine: the hub's files are not looked up")
    if (file := find_gguf(path)) is not None:
        return {tensor.name: tensor.num_bytes for tensor in read_header(file).tensors}
    size = None if dtype == "auto" else getattr(torch, dtype).itemsize
    return {
        name: prod(one.shape) * size if size and one.dtype in _DENSE else one.num_bytes
        for name, one in read_headers(path).items()
    }


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


def rank_bytes(stages: Sequence[int], num_columns: int, num_local: int) -> list[int]:
    """Return the weights of each rank of the machine that needs most, in the order of the layers.

    Args:
        stages: bytes of each stage's weights.
        num_columns: ranks of a stage, which share its columns.
        num_local: ranks of a machine; consecutive ranks are on one.
    """
    ranks = [-(-size // num_columns) for size in stages for _ in range(num_columns)]
    machines = [ranks[first : first + num_local] for first in range(0, len(ranks), num_local)]
    return max(machines, key=sum)


def cpu_memory_finding(ranks: Sequence[int], draft_bytes: int, kv_memory_bytes: int, free_bytes: int) -> Finding:
    """Compare free memory with the needs of this machine's ranks, KV included; a rank reads its own weights alone.

    Args:
        ranks: bytes of each rank's weights.
    """
    served = sum(ranks) + draft_bytes + (len(ranks) + bool(draft_bytes)) * kv_memory_bytes
    shares = list(dict.fromkeys(map(_gb, ranks)))
    text = f"{_gb(free_bytes)} free; {len(ranks)} rank{'s' if len(ranks) > 1 else ''} of {', '.join(shares)} weights"
    text += f" and {_gb(kv_memory_bytes)} KV"
    text += f", draft model {_gb(draft_bytes)}" if draft_bytes else ""
    if served > free_bytes:
        return error("memory", f"{text}: at least {_gb(served)}", _CURE)
    return ok("memory", text)


def gpu_memory_finding(ranks: Sequence[int], draft_bytes: int, free_bytes: Sequence[int]) -> Finding:
    """Compare the free memory of the fullest GPU with the largest part of the weights.

    Args:
        ranks: bytes of each rank's weights.
        free_bytes: of the GPU of each rank.
    """
    share, least = max(ranks), min(free_bytes)
    text = f"at least {_gb(least)} free per GPU; {_gb(share)} weights of a rank"
    text += f", draft model {_gb(draft_bytes)}" if draft_bytes else ""
    if share >= least:
        return error("memory", text, f"more GPUs (--pipeline), or {_CURE}")
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
