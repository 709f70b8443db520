"""A tree of what heads guess, grown best first: a node at depth d is one of head d's guesses, whatever its parent is.

Knows ids, ranks and scores; no heads, and no sequences.
Source: Cai et al., "Medusa", arXiv:2401.10774, sections 2.1.2 and 2.3.3; here with the scores of the current sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple

from betoken.drafters.medusa.choices import Node


class Guesses(NamedTuple):
    """The candidates of one head, best first."""

    token_ids: Sequence[int]
    log_scores: Sequence[float]
    """Logarithms of how likely each is the target's, given its parent; not increasing, -inf for none."""


class Grown(NamedTuple):
    """A draft, best node first, parents before children."""

    draft_ids: list[int]
    parents: list[int]
    """Index of each node's parent; -1 = the last committed token."""
    log_scores: list[float]
    """Logarithms of how likely each node's whole path is the target's."""
    ranks: list[int]
    """Place of each node among its head's guesses."""


class _Candidate(NamedTuple):
    """A node not yet taken; sorts by score, then by age."""

    negative_score: float
    order: int
    choice: int
    """Place of its rank among its parent's."""
    parent: int
    node: Node
    """Its parent's place in the tree of choices."""


def grow(
    guesses: Sequence[Guesses],
    choices: Node,
    *,
    num_nodes: int,
    min_log_score: float,
    max_depth: int,
    end_ids: Collection[int] = (),
) -> Grown:
    """The best `num_nodes` of the nodes that `choices` allow.

    Args:
        guesses: one for each head, the first guesses at what follows the last committed token.
        min_log_score: of every node except the first, whose result calibrates the scores.
        max_depth: ids on a path.
        end_ids: ids that end the answer; nothing follows them.
    """
    grown = Grown([], [], [], [])
    places: list[Node] = []
    depths: list[int] = []
    candidates: list[_Candidate] = []
    num_pushed = 0

    def push(node: Node, choice: int, parent: int) -> None:
        nonlocal num_pushed
        depth = depths[parent] if parent >= 0 else 0
        if depth >= min(max_depth, len(guesses)) or choice >= len(node.ranks):
            return
        rank, (token_ids, log_scores) = node.ranks[choice], guesses[depth]
        if rank < len(token_ids) and log_scores[rank] > -float("inf"):
            score = log_scores[rank] + (grown.log_scores[parent] if parent >= 0 else 0.0)
            heapq.heappush(candidates, _Candidate(-score, num_pushed, choice, parent, node))
            num_pushed += 1

    push(choices, 0, -1)
    while candidates and len(grown.draft_ids) < num_nodes:
        best = heapq.heappop(candidates)
        if grown.draft_ids and -best.negative_score < min_log_score:
            break
        index, depth = len(grown.draft_ids), depths[best.parent] if best.parent >= 0 else 0
        rank = best.node.ranks[best.choice]
        token_id = guesses[depth].token_ids[rank]
        grown.draft_ids.append(token_id)
        grown.parents.append(best.parent)
        grown.log_scores.append(-best.negative_score)
        grown.ranks.append(rank)
        depths.append(depth + 1)
        places.append(best.node.child(rank))
        push(best.node, best.choice + 1, best.parent)  # of one parent the next is never better
        if token_id not in end_ids:
            push(places[index], 0, index)
    return grown
