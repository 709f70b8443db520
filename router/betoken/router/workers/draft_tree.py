"""Draft trees as the router needs them: `parents` [K] holds each node's parent index, -1 = the last committed token.

A parent comes before its children, so every prefix of a tree is a tree. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_sound(parents: Sequence[int]) -> int:
    """Nodes before the first whose parent is neither -1 nor an earlier node."""
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            return index
    return len(parents)


def leading_chain(parents: Sequence[int]) -> int:
    """Nodes before the first that does not follow the one before it."""
    for index, parent in enumerate(parents):
        if parent != index - 1:
            return index
    return len(parents)


def depth(parents: Sequence[int]) -> int:
    """Nodes on the longest path."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return max(depths, default=0)


def is_path(path: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether `path` goes down from the last committed token, one child at a time."""
    last = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != last:
            return False
        last = node
    return True
