"""Which snapshots of recurrent states there are, and the copies that make and use them. Knows numbers only: no tensors.

A snapshot is what a state had seen at the border of a published page, and hangs on that page. Snapshots are bounded:
the one used longest ago makes room. Copies wait, in order, for the next forward, before which no state changes.
"""

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple

from betoken.engine.errors import IntegrityError


class StateCopy(NamedTuple):
    """A copy from a state to a snapshot, or back."""

    state: int
    snapshot: int
    length: int
    """Tokens that the state has seen."""
    is_restore: bool
    """Whether it goes from the snapshot to the state."""


class Snapshots:
    """Snapshots 0 to `num_snapshots` - 1, each of a published page or free."""

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._of_page: OrderedDict[int, int] = OrderedDict()
        """Snapshot by page, the one used longest ago first."""
        self._copies: list[StateCopy] = []

    def __len__(self) -> int:
        return len(self._of_page)

    def __contains__(self, page_id: object) -> bool:
        return page_id in self._of_page

    def save(self, page_id: int, state: int, length: int) -> int | None:
        """Keep a state at the end of a page; return the snapshot, None if the page already has one."""
        if page_id in self._of_page:
            self._of_page.move_to_end(page_id)
            return None
        snapshot = self._free.pop() if self._free else self._of_page.popitem(last=False)[1]
        self._of_page[page_id] = snapshot
        self._copies.append(StateCopy(state, snapshot, length, is_restore=False))
        return snapshot

    def restore(self, page_id: int, state: int, length: int) -> None:
        """Let a state have seen what the page's snapshot has."""
        self._of_page.move_to_end(page_id)
        self._copies.append(StateCopy(state, self._of_page[page_id], length, is_restore=True))

    def drop(self, page_id: int, snapshot: int | None = None) -> None:
        """Free the page's snapshot if it has one; with `snapshot`, if it is this one."""
        if snapshot is None or self._of_page.get(page_id) == snapshot:
            own = self._of_page.pop(page_id, None)
            if own is not None:
                self._free.append(own)

    def take_copies(self) -> list[StateCopy]:
        """The copies to be made before the next forward, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def check_integrity(self, published: Collection[int]) -> None:
        """Compare with the published pages.

        Raises:
            IntegrityError: a snapshot is leaked, has two pages, or hangs on a page that is not found by its ids.
        """
        seen = sorted([*self._free, *self._of_page.values()])
        if seen != list(range(self.num_snapshots)):
            raise IntegrityError(f"snapshots free and of pages are {seen}, there are {self.num_snapshots}")
        if lost := self._of_page.keys() - set(published):
            raise IntegrityError(f"pages {sorted(lost)} have snapshots and are not published")
