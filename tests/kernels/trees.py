"""Random draft trees over paged keys and values, and the same paths as chains."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.kernels.rows import PagedRows, TreePaths


def random_parents(rng: random.Random, num_nodes: int, reach: int) -> list[int]:
    """A tree whose nodes hang on one of the `reach` nodes before them: deep for 1, bushy for many."""
    return [max(-1, node - 1 - rng.randrange(reach)) for node in range(num_nodes)]


_RNG = random.Random(3)
TREE_CASES: dict[str, dict] = {
    "at once": {"parents": [-1, -1, -1], "tree_start": 0},
    "two siblings": {"parents": [-1, -1], "tree_start": 5},
    "a chain": {"parents": [-1, 0, 1, 2], "tree_start": 17},
    "bushy": {"parents": random_parents(_RNG, 40, 30), "tree_start": 100},
    "deep": {"parents": random_parents(_RNG, 40, 2), "tree_start": 30},
    "over a chunk border": {"parents": random_parents(_RNG, 30, 4), "tree_start": 250},
    "after a chunk": {"parents": random_parents(_RNG, 20, 6), "tree_start": 256},
    "window": {"parents": random_parents(_RNG, 30, 3), "tree_start": 300, "window": 9},
    "window in the tree": {"parents": random_parents(_RNG, 40, 2), "tree_start": 20, "window": 5},
    "soft cap": {"parents": random_parents(_RNG, 20, 5), "tree_start": 40, "softcap": 3.0},
    "many heads a key": {"parents": random_parents(_RNG, 9, 5), "tree_start": 40, "num_heads": 24, "num_key_heads": 1},
    "odd sizes": {"parents": random_parents(_RNG, 20, 5), "tree_start": 33, "key_size": 24, "value_size": 40},
    "odd pages": {"parents": random_parents(_RNG, 20, 5), "tree_start": 33, "page_size": 5},
    "spans": {"parents": random_parents(_RNG, 30, 3), "tree_start": 300, "span": 8},
    "slopes": {"parents": random_parents(_RNG, 30, 4), "tree_start": 250, "has_slopes": True},
    "sinks": {"parents": random_parents(_RNG, 9, 4), "tree_start": 252, "has_sinks": True},
    "sinks, window": {"parents": random_parents(_RNG, 9, 3), "tree_start": 40, "window": 5, "has_sinks": True},
}


@dataclass
class TreeCase:
    """One sequence of `tree_start` tokens and a tree; `rows` are the nodes' as a tree."""

    query: Tensor  # [n, Hq, D]
    key_cache: Tensor
    value_cache: Tensor
    rows: PagedRows
    paths: list[list[int]]  # per node: itself and its ancestors, root first
    tree_start: int

    def chain_of(self, node: int) -> tuple[Tensor, Tensor, PagedRows]:
        """Caches in which the node's path is contiguous, and the node's row there."""
        key_cache, value_cache = self.key_cache.clone(), self.value_cache.clone()
        size = key_cache.shape[1]
        for cache, source in ((key_cache, self.key_cache), (value_cache, self.value_cache)):
            flat, old = cache.view(-1, *cache.shape[2:]), source.view(-1, *cache.shape[2:])
            for depth, ancestor in enumerate(self.paths[node]):
                flat[self._pool_slot(self.tree_start + depth, size)] = old[
                    self._pool_slot(self.tree_start + ancestor, size)
                ]
        one = slice(node, node + 1)
        rows = PagedRows(
            self.rows.positions[one], self.rows.row_segments[one], self.rows.page_starts, self.rows.page_ids
        )
        return key_cache, value_cache, rows

    def _pool_slot(self, slot: int, page_size: int) -> int:
        return int(self.rows.page_ids[slot // page_size]) * page_size + slot % page_size


def make_tree_case(
    parents: list[int],
    tree_start: int,
    num_heads: int = 4,
    num_key_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
) -> TreeCase:
    """Keys, values and queries at random; unwritten slots hold 100, so a stray read shows."""
    generator = torch.Generator().manual_seed(len(parents) + tree_start)
    num_slots = tree_start + len(parents)
    num_pages = -(-num_slots // page_size)
    page_ids = torch.randperm(num_pages + 2, generator=generator).int()[:num_pages]
    caches = []
    for size in (key_size, value_size):
        cache = torch.full((num_pages + 2, page_size, num_key_heads, size), 100.0, dtype=dtype)
        for slot in range(num_slots):
            new = torch.randn(num_key_heads, size, generator=generator).to(dtype)
            cache[page_ids[slot // page_size], slot % page_size] = new
        caches.append(cache)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    # The longest possible lists: kernels must accept any suffix of the path that contains all non-contiguous slots.
    starts = torch.tensor([0] + [len(path) for path in paths]).cumsum(0).int()
    slots = torch.tensor([tree_start + node for path in paths for node in path]).int()
    rows = PagedRows(
        torch.tensor([tree_start + len(path) - 1 for path in paths]).int(),
        torch.zeros(len(parents)).int(),
        torch.tensor([0, num_pages]).int(),
        page_ids,
        TreePaths(starts, slots),
    )
    query = torch.randn(len(parents), num_heads, key_size, generator=generator).to(dtype)
    return TreeCase(query, caches[0], caches[1], rows, paths, tree_start)
