"""A tree of what a draft model may say, grown best first while its nodes are written behind the sequence's KV.

Knows ids and how likely they are, not the model, its logits or the sequence.
Source: growing and choosing nodes by the product of shares along their path is EAGLE-2's, Li et al., arXiv:2406.16858.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

ERROR_SCALE = 0.6
"""Distance of a target's logits from its draft's, for scoring drafts. Measured on the shipped pair: with 1 trees are
so broad that chains yield more, with 1/3 so narrow that they yield little more than chains (docs/lessons.md)."""

_LOG_HOPE = math.log(0.05)
"""A forward asks about nodes at least so many times as likely as the likeliest it asks about."""


@dataclass(slots=True)
class _Node:
    """A guess; nodes are numbered in the order they were found."""

    token_id: int
    parent: int
    """Number of its parent, -1 = the last committed token."""
    score: float
    """Logarithm of the product of the shares along its path; at most its parent's."""
    depth: int
    """Ids on its path, itself included."""
    row: int | None = None
    """Its slot, counted from the first of the tree; None while the model has not been asked what follows it."""


class ModelTree:
    """Grows until the `num_nodes` best of all nodes are known, in at most `num_nodes` forwards.

    A share is the softmax of the draft's *perturbed* scores, divided by `ERROR_SCALE`. It is the probability that the
    id is the target's choice, if each target logit is the draft's plus a Gumbel error of that scale and both use the
    same noise. One rule serves every temperature, since the noise is zero at T = 0. A probability before the noise
    would ignore that the noise is known.

    Scores fall along a path, so the best nodes are a tree by themselves. Each forward extends the best nodes so far.
    The first of them stays among the best, so the forwards end after `num_nodes`, mostly after the tree's depth.
    """

    def __init__(self, num_nodes: int, max_branches: int, max_depth: int, end_ids: Collection[int]) -> None:
        """`max_branches`: children of a node. `max_depth`: ids on a path. `end_ids` end the answer: nothing follows
        them."""
        self.max_branches = max_branches
        self.max_depth = max_depth
        self.is_begun = False
        """Whether it is known what follows the last committed token."""
        self._num_nodes = num_nodes
        self._end_ids = end_ids
        self._nodes: list[_Node] = []
        self._rows: list[int] = []
        """The node in each row."""
        self._is_stopped = False
        self._frontier: list[int] | None = None

    @property
    def num_rows(self) -> int:
        """Slots that are written."""
        return len(self._rows)

    @property
    def is_growing(self) -> bool:
        """Whether the model is to be asked more."""
        return not self._is_stopped and (not self.is_begun or bool(self.to_expand()))

    def stop(self) -> None:
        """Do with the nodes there are."""
        self._is_stopped = True

    def to_expand(self) -> list[int]:
        """Nodes to ask the model about next, best first; none when the tree is complete."""
        if self._frontier is None:
            best = self._best(self._num_nodes - 1)  # a child of the last of the best could not be one of them
            waiting = [node for node in best if self._may_expand(self._nodes[node])]
            # The others may turn out not to be among the best: no rows for them until they rank near the first.
            least = self._nodes[waiting[0]].score + _LOG_HOPE if waiting else 0.0
            self._frontier = [node for node in waiting if self._nodes[node].score >= least]
        return self._frontier

    def add_rows(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Give the next slots to `nodes`: their ids, and for every row of the tree the row of its parent."""
        self._frontier = None
        for node in nodes:
            self._nodes[node].row = len(self._rows)
            self._rows.append(node)
        parents = [self._nodes[node].parent for node in self._rows]
        rows = [self._nodes[parent].row if parent >= 0 else -1 for parent in parents]
        return [self._nodes[node].token_id for node in nodes], [row for row in rows if row is not None]

    def add_children(self, parent: int, token_ids: Sequence[int], log_shares: Sequence[float]) -> None:
        """The model's continuations of a node (-1: the last committed token), likeliest first."""
        self.is_begun = True
        self._frontier = None
        score, depth = (self._nodes[parent].score, self._nodes[parent].depth) if parent >= 0 else (0.0, 0)
        for token_id, log_share in zip(token_ids[: self.max_branches], log_shares, strict=False):
            if log_share > -math.inf:
                self._nodes.append(_Node(token_id, parent, score + log_share, depth + 1))

    def path_ids(self, node: int) -> list[int]:
        """Ids from the last committed token down to a node."""
        ids: list[int] = []
        while node >= 0:
            ids.append(self._nodes[node].token_id)
            node = self._nodes[node].parent
        return ids[::-1]

    def best(self) -> tuple[list[int], list[int]]:
        """draft_ids [K] and parents [K] of the best nodes, best first."""
        nodes = self._best(self._num_nodes)
        places = {node: place for place, node in enumerate(nodes)} | {-1: -1}
        return [self._nodes[node].token_id for node in nodes], [places[self._nodes[node].parent] for node in nodes]

    def leading_ids(self) -> list[int]:
        """Ids of the first rows, as far as each follows the previous one: their KV is stored like a chain's."""
        ids: list[int] = []
        last = -1
        for node in self._rows:
            if self._nodes[node].parent != last:
                break
            ids.append(self._nodes[node].token_id)
            last = node
        return ids

    def _best(self, count: int) -> list[int]:
        """The `count` best nodes. The older of equals comes first, so a parent precedes its children."""
        return heapq.nsmallest(count, range(len(self._nodes)), key=lambda node: -self._nodes[node].score)

    def _may_expand(self, node: _Node) -> bool:
        return node.row is None and node.depth < self.max_depth and node.token_id not in self._end_ids
