"""The GPU a figure was measured on, or the sentence that says there is none. An import asks the device nothing."""

import sys
from typing import Any

import torch


def require_device(program: str) -> torch.device | None:
    """The CUDA device, made current; None after a line on standard error if there is none."""
    if not torch.cuda.is_available():
        print(f"{program}: no CUDA device was found; this benchmark measures a GPU and nothing else", file=sys.stderr)
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(device)
    return device


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name, memory, processors, L2 size and the CUDA version torch was built for."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "cuda": torch.version.cuda,
    }
