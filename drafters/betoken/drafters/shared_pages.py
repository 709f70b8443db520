"""The KV pages of one model among all drafters that run it. Knows page lists, not their owners or contents.

When pages run out, a sequence takes pages of younger idle ones, and of older ones only if they have been idle for a
while. Between two drafts all sequences are idle for a moment. Taking turns would cost each its KV every time, and no
prompt would ever be computed to its end.
"""

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from betoken.engine.page_table import PageTable
from betoken.engine.preemption import choose_victims

IDLE_GRACE_S = 1.0
"""How long a sequence without work keeps its pages from younger ones: longer than the rounds of a slow target."""


class IdlePages(NamedTuple):
    """The pages of a sequence that is not at work."""

    order: int
    """Place of the sequence in the order of arrival, see `SharedPages.enter`."""
    since_ns: int
    """When its work ended (`time.perf_counter_ns`)."""
    page_ids: list[int]
    release: Callable[[], None]
    """Gives them back."""


class KvHolder(Protocol):
    """A drafter that keeps KV of its sequences."""

    def page_lists(self) -> Iterable[list[int]]:
        """The page list of every open sequence."""
        ...

    def idle_pages(self) -> Iterable[IdlePages]:
        """Pages of sequences that are not at work."""
        ...


class SharedPages:
    """A page table and those who draw on it."""

    def __init__(self, table: PageTable, idle_grace_s: float = IDLE_GRACE_S) -> None:
        self.table = table
        self._idle_grace_s = idle_grace_s
        self._holders: list[KvHolder] = []
        self._num_entered = 0

    @property
    def num_slots(self) -> int:
        """Tokens that all pages hold together."""
        return self.table.num_pages * self.table.page_size

    def join(self, holder: KvHolder) -> None:
        """Count `holder` among the owners."""
        self._holders.append(holder)

    def enter(self) -> int:
        """The order of a new sequence among all that draw on the pages."""
        self._num_entered += 1
        return self._num_entered

    def make_room(self, order: int, page_ids: list[int], length: int) -> bool:
        """Whether the list of the sequence `order` can be extended to `length` slots, after taking pages of others if
        need be. Pages are taken only if that suffices.
        """
        idle_before_ns = time.perf_counter_ns() - round(self._idle_grace_s * 1e9)
        takeable = (
            idle
            for holder in self._holders
            for idle in holder.idle_pages()
            if idle.order > order or idle.since_ns <= idle_before_ns
        )
        victims = choose_victims(self.table, page_ids, length, takeable)
        if victims is None:
            return False
        while not self.table.can_extend(page_ids, length):
            victims.pop().release()
        return True

    def check_integrity(self) -> None:
        """Re-derive the page accounting from all holders; raises IntegrityError when it is off."""
        self.table.check_integrity(page_ids for holder in self._holders for page_ids in holder.page_lists())
