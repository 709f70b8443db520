"""Who owns which KV page. Knows ids and lengths only: no tensors, no sequences, no policy.

Ownership: a sequence of length n owns the slots [0, n) through its page list; pages [0, n // page_size) are full
and never written again, the page after them may be. A page is free exactly when its reference count is 0.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from foretoken.engine.errors import IntegrityError, OutOfPagesError


class PageTable:
    """Reference-counted pages of `page_size` slots. Page ids are [0, num_pages)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages ({num_pages}) and page_size ({page_size}) must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is the warmest
        self._num_references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def num_pages_for(self, length: int) -> int:
        """Pages that cover `length` slots."""
        return -(-length // self.page_size)

    def allocate(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Pages for a new sequence with these token ids, and how many of its leading ids already have KV (0 for now).

        Raises:
            OutOfPagesError: nothing was allocated.
        """
        page_ids: list[int] = []
        self.extend(page_ids, len(ids))
        return page_ids, 0

    def can_extend(self, page_ids: Sequence[int], length: int) -> bool:
        """Whether `extend` with the same arguments would succeed."""
        return self.num_pages_for(length) - len(page_ids) <= len(self._free)

    def extend(self, page_ids: list[int], length: int) -> None:
        """Append pages, in place, until `length` slots are covered.

        Raises:
            OutOfPagesError: the list is unchanged.
        """
        num_needed = self.num_pages_for(length) - len(page_ids)
        if num_needed <= 0:
            return
        if num_needed > len(self._free):
            raise OutOfPagesError(num_needed, len(self._free))
        for _ in range(num_needed):
            page_id = self._free.pop()
            self._num_references[page_id] = 1
            page_ids.append(page_id)

    def share(self, page_ids: Sequence[int], length: int) -> list[int]:
        """A second owner's list of the pages that are full at `length`: they are immutable, so both may read them."""
        shared = list(page_ids[: length // self.page_size])
        for page_id in shared:
            self._num_references[page_id] += 1
        return shared

    def shrink(self, page_ids: list[int], length: int) -> None:
        """Drop, in place, the pages that hold none of the first `length` slots."""
        num_kept = self.num_pages_for(length)
        while len(page_ids) > num_kept:
            self._drop(page_ids.pop())

    def release(self, page_ids: list[int]) -> None:
        """Drop every page of the list and clear it."""
        while page_ids:
            self._drop(page_ids.pop())

    def num_references(self, page_id: int) -> int:
        """How many lists hold this page."""
        return self._num_references[page_id]

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Re-derive the accounting from every live page list.

        Raises:
            IntegrityError: a page is leaked, free but owned, free twice, or its count is wrong.
        """
        counted: Counter[int] = Counter()
        for page_ids in owners:
            counted.update(page_ids)
        for page_id, num_references in enumerate(self._num_references):
            if counted[page_id] != num_references:
                raise IntegrityError(f"page {page_id} has {num_references} references, {counted[page_id]} owners")
        expected_free = {page_id for page_id, count in enumerate(self._num_references) if count == 0}
        if len(self._free) != len(expected_free) or set(self._free) != expected_free:
            raise IntegrityError(f"{len(self._free)} pages on the free list, {len(expected_free)} unreferenced")
        if unknown := sorted(set(counted) - set(range(self.num_pages))):
            raise IntegrityError(f"pages {unknown} do not exist")

    def _drop(self, page_id: int) -> None:
        count = self._num_references[page_id]
        if count < 1:
            raise IntegrityError(f"page {page_id} is released but has no owner")
        self._num_references[page_id] = count - 1
        if count == 1:
            self._free.append(page_id)
