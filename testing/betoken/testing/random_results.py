"""A random life of one sequence under speculation: chunks of what is decided, drafts, and verification results on them.

Knows ids and trees; what runs them is the caller's.
"""

import random
from collections.abc import Callable, Sequence

VOCAB_SIZE = 101
_MAX_NODES = 8

Forward = Callable[[int, Sequence[int], Sequence[int] | None], object]
"""Runs the ids after a number of existing ones; for a draft also the parents of its nodes, which are the last ids."""
Keep = Callable[[int, Sequence[int]], object]
"""Keeps a path of the draft's nodes behind so many decided ids."""


def draw_path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    """A random path from the root of a tree, of any length."""
    path: list[int] = []
    node = -1
    while children := [child for child, parent in enumerate(parents) if parent == node]:
        if rng.random() < 0.25:
            break
        node = rng.choice(children)
        path.append(node)
    return path


def live_through_results(rng: random.Random, ids: list[int], forward: Forward, keep: Keep, num_rounds: int = 6) -> int:
    """Decide further `ids` round by round; the number of them that were run, which is all but the last."""
    length = 0
    for _ in range(num_rounds):
        while len(ids) - length > 1 and rng.random() < 0.7:  # chunks of what is decided
            num = rng.randrange(1, len(ids) - length)
            forward(length, ids[length : length + num], None)
            length += num
        parents = [rng.randrange(max(-1, node - 4), node) for node in range(rng.randrange(0, _MAX_NODES + 1))]
        drafts = [rng.randrange(VOCAB_SIZE) for _ in parents]
        forward(length, ids[length:] + drafts, parents)
        path = draw_path(rng, parents)
        keep(len(ids), path)
        length = len(ids) + len(path)
        ids += [*(drafts[node] for node in path), rng.randrange(VOCAB_SIZE)]
    return length
