"""A predicted answer, followed while it matches and found again after a difference.

Knows the ids of the prediction and the output, not prompts, drafters or results of drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TRUST = 8
"""A prediction counts at its beginning like a match of so many tokens."""
_TAILS = ((8, None), (4, None), (3, 256), (2, 64), (1, 16))
"""Lengths of the output's end that are looked for after a difference, and how far ahead; None = anywhere."""
_MOST_ASTRAY = 64
"""Tokens after a difference for which its place is still the likeliest one to go on from."""
_ID_BYTES = 4


class Place(NamedTuple):
    """Position at which the output may continue in the prediction."""

    position: int
    """Index of the id that would come next."""
    length: int
    """Tokens that speak for it, as the length of a match does."""


class Prediction:
    """One sequence's prediction, and its output's position in it."""

    def __init__(self, predicted_ids: Iterable[int]) -> None:
        self._ids = array("I", predicted_ids)
        self._bytes = self._ids.tobytes()
        self._tail: list[int] = []
        """The last output ids, up to the length of lookups."""
        self._position = 0
        self._length = _TRUST
        """0 after a difference."""
        self._num_astray = 0
        """Output ids since the difference, which is at the position."""

    @property
    def places(self) -> list[Place]:
        """Positions at which the output may continue, the likeliest first: one, or after a difference up to three."""
        if self._length:
            places = [Place(self._position, self._length)]
        else:
            found = self._find(_TAILS[-1:])
            places = [found] if found is not None else []
            if self._num_astray <= _MOST_ASTRAY:  # as many ids changed, or came between
                places += [Place(self._position + self._num_astray, 1), Place(self._position, 1)]
        first = {place.position: place for place in reversed(places)}
        return [place for place in places if place.position < len(self._ids) and first[place.position] is place]

    def follow(self, ids: Sequence[int]) -> None:
        """The output went on with `ids`."""
        for token_id in ids:
            is_next = self._position < len(self._ids) and self._ids[self._position] == token_id
            if self._length and is_next:
                self._position += 1
                self._length += 1
            else:
                self._length = 0
                self._num_astray += 1
        self._tail = [*self._tail, *ids][-_TAILS[0][0] :]
        if not self._length and (found := self._find(_TAILS[:-1])) is not None:
            self._position, self._length, self._num_astray = found.position, found.length, 0

    def ids_at(self, position: int, num_ids: int) -> list[int]:
        """At most so many ids from there."""
        return self._ids[position : position + num_ids].tolist()

    def _find(self, tails: Sequence[tuple[int, int | None]]) -> Place | None:
        """The place behind the longest end of the output: the first after the difference, else the first of all."""
        for length, reach in tails:
            if len(self._tail) < length:
                continue
            tail = array("I", self._tail[-length:]).tobytes()
            at = self._index(tail, self._position, reach and self._position + self._num_astray + reach)
            if at is None and reach is None:
                at = self._index(tail, 0, None)
            if at is not None:
                return Place(at + length, length)
        return None

    def _index(self, tail: bytes, start: int, end: int | None) -> int | None:
        """Index of the first id of `tail` within [start, end)."""
        last = len(self._bytes) if end is None else end * _ID_BYTES + len(tail)
        at = self._bytes.find(tail, start * _ID_BYTES, last)
        while at >= 0 and at % _ID_BYTES:
            at = self._bytes.find(tail, at + 1, last)
        return at // _ID_BYTES if at >= 0 else None


def grow_places(
    prediction: Prediction,
    places: Sequence[Place],
    *,
    num_nodes: int,
    draft_factor: int,
    min_score: float,
) -> tuple[list[int], list[int], list[float]]:
    """At most `num_nodes` ids that the prediction has at `places`, as draft_ids [K], parents [K] and scores [K].

    Each place gets a part of the nodes by its length; common prefixes share them. A node's score is its place's
    part times L / (L + depth) for a place of length L, as if each token were one more of a match.

    Args:
        places: at least one.
        draft_factor: a place's chain is at most so many times its length; 0 = any.
        min_score: of every node except the first, whose result calibrates the scores.
    """
    draft_ids: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    children: dict[tuple[int, int], int] = {}
    total = sum(place.length for place in places)
    for place in places:
        part = place.length / total
        most = min(max(1, round(num_nodes * part)), place.length * draft_factor or num_nodes)
        node = -1
        for depth, token_id in enumerate(prediction.ids_at(place.position, most), 1):
            score = part * place.length / (place.length + depth)
            known = children.get((node, token_id))
            if known is not None:
                scores[known] += score
                node = known
                continue
            if len(draft_ids) == num_nodes or (draft_ids and score < min_score):
                break
            children[node, token_id] = len(draft_ids)
            draft_ids.append(token_id)
            parents.append(node)
            scores.append(score)
            node = len(draft_ids) - 1
    return draft_ids, parents, scores
