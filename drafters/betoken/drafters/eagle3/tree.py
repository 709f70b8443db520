"""EAGLE-2's dynamic tree: level by level, the likeliest nodes of the last one are asked for their likeliest children.

The likeliest of all scored nodes are the draft. With one branch it is a chain. Knows ids and how likely they are,
not the layer, its scores or the sequence.
Source: Li et al., EAGLE-2, arXiv:2406.16858.
"""

import math
from collections.abc import Collection, Sequence

from betoken.common.tree import is_chain

ROOT = -1
"""Stands for the last committed token."""


class DynamicTree:
    """Nodes are numbered in the order they were found; nodes that cannot be among the best are dropped at once.

    A score is the logarithm of a path's probability, at most its parent's. So the best nodes are a tree by themselves,
    and a node that is the last of the best, or worse, need not be asked: none of its children could be among them.
    """

    def __init__(
        self,
        num_nodes: int,
        max_branches: int,
        max_depth: int,
        end_ids: Collection[int] = (),
        min_score: float = -math.inf,
    ) -> None:
        """Args:
        num_nodes: nodes of the draft, at least 1.
        max_branches: children of a node, and nodes that are asked at a time.
        max_depth: ids on a path.
        end_ids: ids that end the answer; nothing follows them.
        min_score: of every node except the first, whose result calibrates the scores.
        """
        self._num_nodes, self._max_depth = num_nodes, max_depth
        self.max_branches = max_branches
        self._end_ids, self._min_score = end_ids, min_score
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._best: list[int] = []
        """The best nodes so far, best first; the older of equals comes first, so a parent precedes its children."""
        self._rows: dict[int, int] = {}
        """Rows of the requested nodes."""
        self._depth = 0
        self.level: list[int] = [ROOT]
        """Nodes to ask next; empty once the tree is complete."""
        self.level_parents: list[int] = []
        """Places of their parents in the level before."""
        self.row_parents: list[int] = []
        """Row of the parent of every row asked so far, this level's included; -1 = the root."""

    @property
    def level_ids(self) -> list[int]:
        """Ids of the nodes to ask next."""
        return [self._token_ids[node] for node in self.level]

    @property
    def level_shares(self) -> list[float]:
        """Probabilities that the target's text goes through each of the nodes to ask next."""
        return [math.exp(self._scores[node]) if node >= 0 else 1.0 for node in self.level]

    @property
    def is_chain(self) -> bool:
        """Whether every row so far follows the one before it."""
        return is_chain(self.row_parents)

    def add(self, children: Sequence[tuple[Sequence[int], Sequence[float]]]) -> None:
        """Continuations of each node of the level, likeliest first: ids and log-probabilities; -inf marks an absent
        child."""
        places = {node: place for place, node in enumerate(self.level)}
        found: list[int] = []
        for parent, (token_ids, log_probs) in zip(self.level, children, strict=True):
            score = self._scores[parent] if parent >= 0 else 0.0
            for token_id, log_prob in zip(token_ids[: self.max_branches], log_probs, strict=False):
                if log_prob > -math.inf and (score + log_prob >= self._min_score or not self._token_ids):
                    found.append(len(self._token_ids))
                    self._token_ids.append(token_id)
                    self._parents.append(parent)
                    self._scores.append(score + log_prob)
        self._best = sorted(self._best + found, key=self._rank)[: self._num_nodes]
        self._depth += 1
        self._descend(found, places)

    def stop(self) -> None:
        """Do with the nodes there are."""
        self.level, self.level_parents = [], []

    def path_ids(self, node: int) -> list[int]:
        """Ids from the last committed token down to a node."""
        ids: list[int] = []
        while node >= 0:
            ids.append(self._token_ids[node])
            node = self._parents[node]
        return ids[::-1]

    def best(self) -> tuple[list[int], list[int], list[float]]:
        """draft_ids [K], parents [K] and log-probabilities of the paths [K] of the best nodes, best first."""
        places = {node: place for place, node in enumerate(self._best)} | {ROOT: -1}
        return (
            [self._token_ids[node] for node in self._best],
            [places[self._parents[node]] for node in self._best],
            [self._scores[node] for node in self._best],
        )

    def _descend(self, found: list[int], places: dict[int, int]) -> None:
        if self._depth >= self._max_depth:
            self.stop()
            return
        asked = set(self._best[: self._num_nodes - 1])
        likeliest = sorted(found, key=self._rank)[: self.max_branches]
        self.level = [node for node in likeliest if node in asked and self._token_ids[node] not in self._end_ids]
        self.level_parents = [places[self._parents[node]] for node in self.level]
        for node in self.level:
            self._rows[node] = len(self.row_parents)
            self.row_parents.append(self._rows.get(self._parents[node], -1))

    def _rank(self, node: int) -> tuple[float, int]:
        return -self._scores[node], node
