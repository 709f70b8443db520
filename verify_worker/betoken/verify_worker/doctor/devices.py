"""GPUs: driver, number, memory, and access of GPUs to each other's memory; none is an ok finding on a CPU."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from betoken.verify_worker.doctor.finding import Finding, error, ok, warning


class Gpu(NamedTuple):
    """A GPU that torch can use."""

    name: str
    free_bytes: int
    total_bytes: int


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine."""
    if not torch.cuda.is_available():
        return []
    numbers = range(torch.cuda.device_count())
    return [Gpu(torch.cuda.get_device_name(number), *torch.cuda.mem_get_info(number)) for number in numbers]


def device_finding(device: str, num_ranks: int, found: Sequence[Gpu], cuda: str | None = torch.version.cuda) -> Finding:
    """Compare the number of GPUs with the ranks, which use one each from `device` on.

    Args:
        cuda: CUDA version of the torch build; None = a build for CPUs.
    """
    build = f"torch {torch.__version__} for CUDA {cuda}" if cuda else f"torch {torch.__version__} for CPUs"
    shown = "; ".join(f"{gpu.name}, {gpu.total_bytes / 1e9:.0f} GB" for gpu in found) or "no GPU"
    text = f"{build}; {shown}"
    if not device.startswith("cuda"):
        return ok("devices", f"{device}: {text}")
    if not cuda:
        return error("devices", text, "install a torch build for CUDA, or choose --device cpu")
    if not found:
        cure = (
            f"install a driver for CUDA {cuda} (`nvidia-smi` shows it); containers: --gpus all; or choose --device cpu"
        )
        return error("devices", text, cure)
    first = torch.device(device).index or 0
    if first + num_ranks > len(found):
        cure = f"at most {max(1, len(found) - first)} ranks, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        return error("devices", f"{text}: {num_ranks} ranks from {device} on need {first + num_ranks} GPUs", cure)
    return ok("devices", text)


def peer_access_finding(pairs: Sequence[tuple[int, int, bool]]) -> Finding:
    """Args:
    pairs: two GPUs each, and whether one can read the other's memory.
    """
    lacking = [f"{one} and {other}" for one, other, can_access in pairs if not can_access]
    if not lacking:
        return ok("peer access", "between all GPUs of the ranks")
    found = f"none between GPUs {', '.join(lacking)}: they exchange through host memory"
    return warning("peer access", found, "`nvidia-smi topo -p2p r` shows the cause: IOMMU, ACS, or GPUs that lack it")


def peer_pairs(first: int, num_ranks: int) -> list[tuple[int, int, bool]]:
    """Return the pairs of the ranks' GPUs and whether the first can read the second's memory."""
    numbers = range(first, first + num_ranks)
    pairs = [(one, other) for one in numbers for other in numbers if one < other]
    return [(one, other, torch.cuda.can_device_access_peer(one, other)) for one, other in pairs]
