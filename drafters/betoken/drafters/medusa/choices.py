"""Trees as lists of paths: each path says which of every head's guesses its nodes are, 0 the best.

Knows ranks, no ids. Needs no torch.
Source: FasterDecoding/Medusa, medusa/model/medusa_choices.py (mc_sim_7b_63).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

AUTO = "auto"
"""Name of the tree that is grown anew for each draft."""

MAX_RANK = 63
_MAX_TEXT = 16384
_MAX_PATHS, _MAX_DEPTH = 512, 32

# One word a path, one digit a rank.
_MC_SIM_7B_63 = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003"
    " 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)


class Branches:
    """A node whose children are its best so many, as are theirs."""

    def __init__(self, num_branches: int) -> None:
        self.ranks: Sequence[int] = range(num_branches)

    def child(self, rank: int) -> Branches:
        """The node of that rank below this one."""
        return self


class ChoiceTree:
    """A node of a tree that is given by paths."""

    def __init__(self, paths: Sequence[Sequence[int]]) -> None:
        self.ranks: Sequence[int] = sorted({path[0] for path in paths if path})
        self._children = {
            rank: ChoiceTree([path[1:] for path in paths if path and path[0] == rank]) for rank in self.ranks
        }

    def child(self, rank: int) -> ChoiceTree:
        """The node of that rank below this one."""
        return self._children[rank]


Node = Branches | ChoiceTree
"""Children of a node: their `ranks`, ascending, and each `child`."""


def parse_paths(text: str) -> tuple[tuple[int, ...], ...] | None:
    """The paths that a text stands for, shorter ones first; None for `auto`.

    Raises:
        ValueError: it is neither `auto`, nor a known name, nor a JSON list of paths that is a tree.
    """
    if text == AUTO:
        return None
    if text == "mc_sim_7b_63":
        return tuple(
            tuple(map(int, word)) for word in sorted(_MC_SIM_7B_63.split(), key=lambda word: (len(word), word))
        )
    try:
        paths = json.loads(text) if len(text) <= _MAX_TEXT else None
    except (ValueError, RecursionError):
        paths = None
    if not isinstance(paths, list) or not 1 <= len(paths) <= _MAX_PATHS or not all(map(_is_path, paths)):
        limit = f"1 to {_MAX_PATHS} paths of 1 to {_MAX_DEPTH} ranks, each 0 to {MAX_RANK}"
        raise ValueError(f"must be {AUTO}, mc_sim_7b_63, or a JSON list of {limit}")
    found = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
    for path in found:
        if len(path) > 1 and path[:-1] not in found:
            raise ValueError(f"must hold {list(path[:-1])} too, the beginning of its path {list(path)}")
    return tuple(found)


def _is_path(path: object) -> bool:
    return (
        isinstance(path, list)
        and 1 <= len(path) <= _MAX_DEPTH
        and all(type(rank) is int and 0 <= rank <= MAX_RANK for rank in path)
    )
