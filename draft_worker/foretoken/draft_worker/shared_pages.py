"""The KV pages of one model among all drafters that run it. Knows page lists, not whose they are or what they hold."""

from collections.abc import Iterable
from typing import Protocol

from foretoken.engine.page_table import PageTable


class PageHolder(Protocol):
    """A drafter that keeps KV of its sequences."""

    def page_lists(self) -> Iterable[list[int]]:
        """The page list of every open sequence."""
        ...

    def free_idle(self) -> bool:
        """Give back the pages of one sequence that is not at work; whether there was one."""
        ...


class SharedPages:
    """A page table and those who draw on it."""

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self._holders: list[PageHolder] = []

    @property
    def num_slots(self) -> int:
        """Tokens that all pages hold together."""
        return self.table.num_pages * self.table.page_size

    def join(self, holder: PageHolder) -> None:
        """Count `holder` among the owners."""
        self._holders.append(holder)

    def make_room(self, page_ids: list[int], length: int) -> bool:
        """Whether the list can be extended to `length` slots, after taking pages of sequences not at work."""
        while not self.table.can_extend(page_ids, length):
            if not any(holder.free_idle() for holder in self._holders):
                return False
        return True

    def check_integrity(self) -> None:
        """Re-derive the page accounting from all holders; raises IntegrityError when it is off."""
        self.table.check_integrity(page_ids for holder in self._holders for page_ids in holder.page_lists())
