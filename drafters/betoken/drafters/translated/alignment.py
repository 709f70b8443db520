"""Alignment of a text's new encoding with the old one, as in string-level exact match (SLEM).

Source: Timor et al., arXiv:2502.05202, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Alignment(NamedTuple):
    """How an old encoding becomes the new one."""

    num_replaced: int
    """Last old ids that the new encoding replaces."""
    tail: list[int]
    """New ids in their place, and after them."""


def align(old_ids: Sequence[int], new_ids: Sequence[int]) -> Alignment | None:
    """Align two encodings along their longest common diagonal: the longest run of equal ids.

    Args:
        old_ids: [M] end of the old encoding.
        new_ids: [N] encoding of the text of `old_ids` and of what follows it.

    Returns:
        What follows the run; None if the encodings have no id in common. Among equally long runs, the run that replaces
        the fewest ids is used, then the first in `new_ids`.
    """
    best = (0, 0, 0)
    before = [0] * (len(new_ids) + 1)
    for old_end, old_id in enumerate(old_ids, 1):
        row = [0] * (len(new_ids) + 1)
        for new_end, new_id in enumerate(new_ids, 1):
            if old_id == new_id:
                row[new_end] = before[new_end - 1] + 1
                best = max(best, (row[new_end], old_end, -new_end))
        before = row
    length, old_end, minus_new_end = best
    return Alignment(len(old_ids) - old_end, list(new_ids[-minus_new_end:])) if length else None
