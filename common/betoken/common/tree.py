"""Draft trees: `parents` [K] holds each node's parent index, -1 = the token before the tree.

A parent comes before its children, so every prefix of a tree is a tree. Knows no tokens; imports nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


def num_sound(parents: Sequence[int]) -> int:
    """Nodes before the first whose parent is neither -1 nor an earlier node; all of them in a tree."""
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            return index
    return len(parents)


def leading_chain(parents: Sequence[int]) -> int:
    """Nodes before the first that does not follow the one before it; all of them in a chain."""
    for index, parent in enumerate(parents):
        if parent != index - 1:
            return index
    return len(parents)


def is_chain(parents: Sequence[int]) -> bool:
    """Whether each node follows the one before it."""
    return leading_chain(parents) == len(parents)


def unless_chain(parents: list[int]) -> list[int] | None:
    """The parents of a tree with branches; None of a chain, which needs none."""
    return None if is_chain(parents) else parents


def node_depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node; children of the token before the tree have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def longest_path(parents: Sequence[int]) -> int:
    """Nodes on the longest path; 0 of an empty tree."""
    return max(node_depths(parents), default=-1) + 1


def is_path(path: Sequence[int], parents: Sequence[int]) -> bool:
    """Whether `path` goes down from the token before the tree, one child at a time."""
    last = -1
    for node in path:
        if not 0 <= node < len(parents) or parents[node] != last:
            return False
        last = node
    return True
