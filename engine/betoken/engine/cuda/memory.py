"""How many KV pages fit a GPU: what the largest forward leaves of its memory. The arithmetic knows numbers only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from betoken.engine.errors import ModelRefusedError


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes that a device has left after a largest forward."""

    free_bytes: int
    """Free, with the forward's own memory still held by the allocator."""
    forward_bytes: int
    """Memory of that forward in addition to the weights; captured graphs need as much again, separately."""


def measure_forward(run: Callable[[], object], device: torch.device) -> MemoryUse:
    """Run the largest forward there will be and see what it leaves of a CUDA device."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held_before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return MemoryUse(free_bytes, max(0, peak - held_before))


def count_pages(use: MemoryUse, kv_fraction: float, page_bytes: int, page_size: int, max_context: int) -> int:
    """Pages of `page_bytes` in a fraction of what is left, one kept aside for padding rows.

    Raises:
        ModelRefusedError: not even one sequence of `max_context` tokens fits.
    """
    left_bytes = int((use.free_bytes - use.forward_bytes) * kv_fraction)
    num_pages = max(0, left_bytes) // page_bytes - 1
    if num_pages * page_size < max_context:
        raise ModelRefusedError(
            f"the device has memory left for KV of {max(0, num_pages) * page_size} tokens, a sequence of max_context"
            f" needs {max_context}: lower max_context or max_num_batched_tokens, or free memory on the device"
        )
    return num_pages
