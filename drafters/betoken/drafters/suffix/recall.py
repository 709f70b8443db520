"""The likely continuations of a match in a memory, scored by their frequency."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from betoken.drafters.ngram.tree import grow_scored
from betoken.drafters.suffix.text_store import Match

_State: TypeAlias = tuple[list[list[int]], int]
"""Continuations that begin with a node's path, the most recent one first, and the length of the path."""


def grow_continuations(
    match: Match, *, num_nodes: int, max_branches: int, max_depth: int, min_score: float
) -> tuple[list[int], list[int], list[float]]:
    """At most `num_nodes` ids that follow the match, as draft_ids [K], parents [K] and scores [K], the best first.

    A node's score is its parent's score times its share among the continuations of the same path, the most recent one
    counted twice, times L / (L + 1) for a match of L tokens including the path.

    Source: the scoring by frequency follows SuffixDecoding (Oliaro et al., arXiv:2411.04975).
    """

    def expand(state: _State, length: int) -> tuple[int, Iterable[tuple[float, int, _State]]]:
        rows, depth = state
        return length, [
            (share, token_id, (of, depth + 1)) for share, token_id, of in _shares(rows, depth)[:max_branches]
        ]

    return grow_scored(
        expand, (match.continuations, 0), match.length, num_nodes=num_nodes, max_depth=max_depth, min_score=min_score
    )


def _shares(rows: Sequence[list[int]], depth: int) -> list[tuple[float, int, list[list[int]]]]:
    """(share, token id, continuations with it) of the ids at this depth, the most frequent first."""
    by_id: dict[int, list[list[int]]] = {}
    for row in rows:
        if len(row) > depth:
            by_id.setdefault(row[depth], []).append(row)
    most_recent = next(iter(by_id), None)
    weights = [(len(of) + (token_id == most_recent), token_id) for token_id, of in by_id.items()]
    total = sum(weight for weight, _ in weights)
    return [(weight / total, token_id, by_id[token_id]) for weight, token_id in sorted(weights, reverse=True)]
