"""Random accepted paths as moves between slots of a pool, 20 slots a sequence."""

import random

import torch
from torch import Tensor

NUM_SLOTS = 20


def random_caches(num_sequences: int, dtype: torch.dtype) -> list[Tensor]:
    """Keys [pages, 4, 3, 24] and values [pages, 4, 3, 40] of that many sequences and one page more."""
    generator = torch.Generator().manual_seed(num_sequences)
    num_pages = num_sequences * NUM_SLOTS // 4 + 1
    return [torch.randn(num_pages, 4, 3, size, generator=generator).to(dtype) for size in (24, 40)]


def path_moves(rng: random.Random, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sources, targets and starts: sequence s moves some ascending slots to its slots from some start on."""
    sources: list[int] = []
    targets: list[int] = []
    starts = [0]
    for sequence in range(num_sequences):
        start = rng.randrange(10)
        path = sorted(rng.sample(range(start, NUM_SLOTS), rng.randrange(0, NUM_SLOTS - start)))
        sources += [sequence * NUM_SLOTS + slot for slot in path]
        targets += [sequence * NUM_SLOTS + start + depth for depth in range(len(path))]
        starts.append(len(sources))
    return torch.tensor(sources).long(), torch.tensor(targets).long(), torch.tensor(starts)
