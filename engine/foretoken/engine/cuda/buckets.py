"""Which numbers of rows a graph is captured for. Knows numbers only."""

from bisect import bisect_left
from collections.abc import Sequence

_MULTIPLES = ((64, 16), (128, 32), (256, 64))
"""Up to so many rows a bucket is a multiple of this; beyond them of 128. A linear layer's smallest tile has 16 rows, so
that fewer rows would not be faster."""
_LARGE_MULTIPLE = 128


def bucket_sizes(max_rows: int) -> list[int]:
    """Ascending numbers of rows; the last one holds `max_rows`. Empty for 0 rows."""
    sizes: list[int] = []
    while max_rows > (sizes[-1] if sizes else 0):
        last = sizes[-1] if sizes else 0
        sizes.append(last + next((multiple for bound, multiple in _MULTIPLES if last < bound), _LARGE_MULTIPLE))
    return sizes


def choose_bucket(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket that holds the rows, None beyond the largest."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None
