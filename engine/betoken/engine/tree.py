"""Draft trees as lists of parents: depths, slots of the nodes of a sequence's tree, and the nodes to keep.

A tree is `parents` [n]: the index of each node's parent, -1 for the token before the tree, each below the node's own
index. It knows no token ids, no pages and no model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from betoken.common.tree import node_depths


@dataclass(frozen=True, slots=True)
class KeptPath:
    """Nodes of a sequence's tree that become its chain: the KV of nodes[i] moves to slot tree_start + i."""

    page_ids: Sequence[int]
    tree_start: int
    """Slot of node 0."""
    nodes: Sequence[int]
    """Ascending."""


def place_nodes(parents: Sequence[int], tree_start: int, first_node: int = 0) -> tuple[list[int], dict[int, list[int]]]:
    """Positions of the nodes from `first_node` on, in a tree whose node i has slot tree_start + i.

    Returns:
        Their positions; and for each node whose path is not contiguous, the slots of its path from the first on
        whose number is not the position's. Keys are node - first_node.
    """
    first_node = max(0, first_node)
    depths = node_depths(parents)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, tree_start + node] if before or depths[node] != node else [])
    placed = [tree_start + depth for depth in depths[first_node:]]
    return placed, {node: path for node, path in enumerate(paths[first_node:]) if path}
