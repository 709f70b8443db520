"""Selects the sequences that give up KV pages when pages run out: the youngest first, and only if that suffices.

Knows page lists; whose they are and what is done with them is the caller's.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from betoken.engine.page_table import PageTable


class PageHolder(Protocol):
    """A sequence with pages."""

    @property
    def order(self) -> int:
        """Place in the order of arrival."""
        ...

    @property
    def page_ids(self) -> list[int]: ...


HolderT = TypeVar("HolderT", bound=PageHolder)


def choose_victims(
    table: PageTable, page_ids: Sequence[int], length: int, takeable: Iterable[HolderT]
) -> list[HolderT] | None:
    """Holders to release, one by one from the list's end, until `page_ids` can cover `length` slots.

    Args:
        takeable: holders that may lose their pages.
    Returns:
        Empty if enough pages are free, None if all their pages would be too few.
    """
    if table.can_extend(page_ids, length):
        return []
    holders = list(takeable)
    num_missing = table.num_pages_for(length) - len(page_ids) - table.num_free
    if table.num_freed(holder.page_ids for holder in holders) < num_missing:
        return None
    return sorted(holders, key=lambda holder: holder.order)
