"""Contiguous ranges of a layer's output columns, one for each rank."""

from typing import NamedTuple

from betoken.engine.rank_group import RankGroup

_UNIT = 64
"""Columns that the CPU kernels pack together; layers that end on a whole unit can be joined."""
_WIDE = 256
"""Columns of a rank from which on ranges are whole units."""


class Columns(NamedTuple):
    """The columns [start, stop) of `total` that a rank computes."""

    start: int
    stop: int
    total: int
    width: int
    """Columns of every rank but the last ones, which may have fewer."""

    @property
    def size(self) -> int:
        """Columns of the rank."""
        return self.stop - self.start

    @property
    def range(self) -> slice:
        """The columns as an index."""
        return slice(self.start, self.stop)


def columns_of(group: RankGroup, total: int) -> Columns | None:
    """Return the rank's columns of `total`; None if a rank would have none, so that every rank computes all."""
    return units_of(group, total, _UNIT if total >= _WIDE * group.size else 1)


def units_of(group: RankGroup, total: int, unit: int) -> Columns | None:
    """Return the rank's columns of `total` in whole units, such as heads; None if a rank would have none."""
    num_units = -(-total // unit)
    per_rank = -(-num_units // group.size)
    if per_rank * (group.size - 1) >= num_units:
        return None
    width = per_rank * unit
    return Columns(min(group.rank * width, total), min((group.rank + 1) * width, total), total, width)
