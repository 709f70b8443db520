"""The paged KV tensors of a model. It knows layers, pages and slots, not sequences.

For a short convolution the pages hold each token's input, as a key of one head without a value.
"""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from betoken.engine.staging import to_device
from betoken.engine.tree import KeptPath
from betoken.kernels.kv_compact import kv_compact_layers


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Key heads, size of a key, size of a value; of a convolution 1, its channels, 0."""

    num_heads: int
    key_size: int
    value_size: int

    def page_bytes(self, page_size: int, itemsize: int) -> int:
        return page_size * self.num_heads * (self.key_size + self.value_size) * itemsize


class KvPool:
    """One key and one value cache per layer: [num_pages, page_size, heads, size]."""

    def __init__(
        self, shapes: dict[int, LayerShape], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        for layer, shape in shapes.items():
            lead = (num_pages, page_size, shape.num_heads)
            self.keys[layer] = zeros((*lead, shape.key_size), dtype, device)
            self.values[layer] = zeros((*lead, shape.value_size), dtype, device)

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Move the keys and values of each path to the slots of a chain; no two paths share a page."""
        sources: list[int] = []
        targets: list[int] = []
        starts = [0]
        for path in paths:
            moves = [(path.tree_start + node, path.tree_start + i) for i, node in enumerate(path.nodes) if node != i]
            sources += [self._pool_slot(path.page_ids, source) for source, _ in moves]
            targets += [self._pool_slot(path.page_ids, target) for _, target in moves]
            starts.append(len(sources))
        if not sources:
            return
        device = next(iter(self.keys.values())).device
        columns = to_device([np.array(column, np.int64) for column in (sources, targets, starts)], device)
        kv_compact_layers(list(self.keys.values()), [self.values[layer] for layer in self.keys], *columns)

    def _pool_slot(self, page_ids: Sequence[int], slot: int) -> int:
        return page_ids[slot // self.page_size] * self.page_size + slot % self.page_size


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, not empty: a slot never written may be read, masked, and must be finite. On a CPU they are the system's
    own, which take memory once they are written to."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
