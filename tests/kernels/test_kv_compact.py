"""kv_compact: a path ends up in the slots of a chain; nothing else moves."""

import random

import pytest
import torch

from betoken.kernels.kv_compact import kv_compact
from tests.kernels.kv_moves import path_moves, random_caches


def test_moves_of_kv_compact_are_made_in_order() -> None:
    rng = random.Random(2)
    for _ in range(50):
        sources, targets, starts = path_moves(rng, 4)
        caches = random_caches(4, torch.float32)
        expected = [cache.clone() for cache in caches]
        for cache in expected:
            slots = cache.view(-1, *cache.shape[2:])
            for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
                slots[target] = slots[source].clone()
        kv_compact(*caches, sources, targets, starts)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(caches, expected, strict=True))


@pytest.mark.parametrize(
    ("sources", "targets", "starts", "name"),
    [
        ([0, 1], [0], [0, 2], "targets"),
        ([21], [0], [0, 1], "sources"),
        ([1], [-1], [0, 1], "targets"),
        ([1], [0], [0, 2], "starts"),
        ([1], [0], [], "starts"),
        ([1.0], [0], [0, 1], "sources"),
    ],
)
def test_bad_moves_of_kv_compact_are_rejected(sources: list, targets: list, starts: list, name: str) -> None:
    key_cache, value_cache = (torch.zeros(5, 4, 1, 8) for _ in range(2))
    with pytest.raises(ValueError, match=f"^{name} must"):
        kv_compact(key_cache, value_cache, *(torch.tensor(column) for column in (sources, targets, starts)))


def test_caches_that_do_not_fit_kv_compact_are_rejected() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="alike"):
        kv_compact(torch.zeros(5, 4, 1, 8), torch.zeros(5, 4, 2, 8), nothing, nothing, torch.tensor([0]))
