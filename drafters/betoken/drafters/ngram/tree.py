"""A tree of the ways in which earlier occurrences of the last tokens went on, the likeliest nodes first.

Source: the scoring by frequency follows SuffixDecoding (Oliaro et al., arXiv:2411.04975). Knows ids, not sequences.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from betoken.drafters.ngram.suffix_automaton import SuffixAutomaton

StateT = TypeVar("StateT")


class _Candidate(NamedTuple, Generic[StateT]):
    """A node not yet taken; sorts by score, then by age."""

    negative_score: float
    order: int
    token_id: int
    parent: int
    depth: int
    state: StateT
    length: int
    """Length of the match that proposed the node's children, tokens."""


def grow_tree(
    automaton: SuffixAutomaton,
    ids: Sequence[int],
    match: tuple[int, int],
    *,
    num_nodes: int,
    max_branches: int,
    max_depth: int,
    min_score: float,
) -> tuple[list[int], list[int], list[float]]:
    """At most `num_nodes` continuations of `ids` as draft_ids [K], parents [K] and scores [K], the best first.

    A node's score is its parent's score times two factors. The first is its token's share among the continuations of
    the matched n-gram, the most recent counting twice. The second is L / (L + 1) for a match of L tokens, since a
    longer match deserves more trust. Scores are close to the share of nodes that a target accepts (docs/lessons.md).

    Args: automaton: of exactly `ids`. match: state and length of the matched suffix, at least 1 long. min_score: lowest
    score of every node except the first, whose result calibrates the scores.
    """

    def expand(state: int, length: int) -> tuple[int, Iterable[tuple[float, int, int]]]:
        if not automaton.continuations(state):  # the present: go on as the match itself does
            state, length = match
        return length, _shares(automaton, ids, state, max_branches)

    return grow_scored(expand, *match, num_nodes=num_nodes, max_depth=max_depth, min_score=min_score)


def grow_scored(
    expand: Callable[[StateT, int], tuple[int, Iterable[tuple[float, int, StateT]]]],
    state: StateT,
    length: int,
    *,
    num_nodes: int,
    max_depth: int,
    min_score: float,
) -> tuple[list[int], list[int], list[float]]:
    """A tree of at most `num_nodes` continuations as draft_ids [K], parents [K] and scores [K]; see `grow_tree`.

    `expand`: gives the length of a state's match, and share, token id and state of each of its continuations.
    """
    draft_ids: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    candidates: list[_Candidate[StateT]] = []
    node, depth, score = -1, 0, 1.0
    num_pushed = 0
    while True:
        if depth < max_depth:
            length, continuations = expand(state, length)
            for share, token_id, target in continuations:
                child_score = score * share * length / (length + 1)
                child = _Candidate(-child_score, num_pushed, token_id, node, depth + 1, target, length + 1)
                heapq.heappush(candidates, child)
                num_pushed += 1
        if not candidates or len(draft_ids) == num_nodes or (draft_ids and -candidates[0].negative_score < min_score):
            return draft_ids, parents, scores
        best = heapq.heappop(candidates)
        node, depth, score = len(draft_ids), best.depth, -best.negative_score
        draft_ids.append(best.token_id)
        parents.append(best.parent)
        scores.append(score)
        state, length = best.state, best.length


def _shares(
    automaton: SuffixAutomaton, ids: Sequence[int], state: int, max_branches: int
) -> list[tuple[float, int, int]]:
    """(share, token id, state) of the most frequent continuations of a state."""
    most_recent = ids[automaton.next_position(state)]
    continuations = automaton.continuations(state)
    if len(continuations) == 1:  # most are
        ((token_id, target),) = continuations.items()
        return [(1.0 if automaton.count(target) or token_id == most_recent else 0.0, token_id, target)]
    weights = [
        (automaton.count(target) + (token_id == most_recent), token_id, target)
        for token_id, target in continuations.items()
    ]
    total = max(1, sum([weight for weight, _, _ in weights]))
    weights.sort(reverse=True)
    return [(weight / total, token_id, target) for weight, token_id, target in weights[:max_branches]]
