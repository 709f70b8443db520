"""The longest path of a draft all of whose nodes are accepted, each judged by itself: plain Python over numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def longest_path(
    is_accepted: Sequence[bool], shares: Sequence[float], parents: Sequence[int] | None = None
) -> list[int]:
    """The nodes of the longest accepted path, root first; of equally long ones the likeliest, then the first.

    Example: accepted nodes 0, 1 and 3 with parents [-1, -1, 0, 1] give [1, 3].

    Args:
        is_accepted: [K], whether the target takes each node after its own path.
        shares: [K], how likely the target takes it for.
        parents: [K] indices of nodes, -1 for the last committed token, each below its own index; None = a chain.
    Source:
        Cai et al., "Medusa", arXiv:2401.10774, section 2.3.1.
    """
    reached: dict[int, tuple[int, float]] = {-1: (0, 0.0)}  # node -> length and log-likelihood of its path
    best = -1
    for node, (is_taken, share) in enumerate(zip(is_accepted, shares, strict=True)):
        before = reached.get(node - 1 if parents is None else parents[node])
        if before is None or not is_taken:
            continue
        reached[node] = (before[0] + 1, before[1] + math.log(share))
        if reached[node] > reached[best]:
            best = node
    path: list[int] = []
    while best >= 0:
        path.insert(0, best)
        best = best - 1 if parents is None else parents[best]
    return path
