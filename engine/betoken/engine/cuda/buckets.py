"""Which numbers of rows, and which longest contexts, a graph is captured for. Knows numbers only."""

from bisect import bisect_left
from collections.abc import Sequence

_MULTIPLES = ((64, 16), (128, 32), (256, 64))
"""Up to so many rows a bucket is a multiple of this; beyond them of 128. A linear layer's smallest tile has 16 rows, so
that fewer rows would not be faster."""
_LARGE_MULTIPLE = 128

_PATH_SLOTS_PER_ROW = 16
"""Slots of tree paths a graph has room for, for each of its rows; a batch with more runs eagerly."""

_MAX_GRAPH_PAGES = 1 << 20
"""Most page ids a graph has room for: 4 MB of them on the device; a batch with more runs eagerly."""

_FIRST_LENGTH = 1024
_LENGTH_FACTOR = 4
"""An attention launch of few rows divides as many keys as the longest sequence may have: bounds this far apart."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending numbers of rows; the last one holds `max_rows`. Empty for 0 rows."""
    sizes: list[int] = []
    while max_rows > (sizes[-1] if sizes else 0):
        last = sizes[-1] if sizes else 0
        sizes.append(last + next((multiple for bound, multiple in _MULTIPLES if last < bound), _LARGE_MULTIPLE))
    return sizes


def tail_size(num_rows: int, max_length: int, page_size: int) -> int:
    """Page ids, the scratch page and slots of tree paths that a graph has room for. Each sequence names all its pages,
    shared ones too."""
    num_pages = min(num_rows * -(-max_length // page_size), _MAX_GRAPH_PAGES)
    return num_pages + 1 + _PATH_SLOTS_PER_ROW * num_rows


def length_bounds(max_context: int) -> list[int]:
    """Ascending bounds on a sequence's length; the last one is `max_context`."""
    bounds = [_FIRST_LENGTH]
    while bounds[-1] < max_context:
        bounds.append(bounds[-1] * _LENGTH_FACTOR)
    return [*bounds[:-1], max_context]


def choose_bucket(sizes: Sequence[int], number: int) -> int | None:
    """The smallest of ascending sizes that holds the number, None beyond the largest."""
    index = bisect_left(sizes, number)
    return sizes[index] if index < len(sizes) else None
