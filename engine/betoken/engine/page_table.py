"""Who owns which KV page, and what the full ones hold. Knows ids and lengths only: no tensors, no sequences, no policy.

Ownership: a sequence of length n owns the slots [0, n) through its page list. Pages [0, n // page_size) are full and
never written again; the page after them may be. A page is free exactly when its reference count is 0.

Prefix caching: a full page that was published is known by its ids and the published page before it. Ids are compared
one by one, never by hash, so sequences that begin alike share pages. A published page keeps its content after its last
owner has gone, until the page is needed. Pages without content are taken first, then the pages left longest ago, the
end of a text before its beginning. A row depends on its own sequence alone, so found KV equals computed KV to the bit.
A model with recurrent states goes on from the last found page that has a snapshot of its state.
Source: automatic prefix caching as in vLLM (Kwon et al., arXiv:2309.06180), without hashes.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from betoken.engine.errors import IntegrityError, OutOfPagesError
from betoken.engine.snapshots import Snapshots
from betoken.engine.state_table import Borders, PageList, StateTable

_START = 0
"""The node before the first page."""


@dataclass(slots=True)
class Found:
    """Published pages that hold a text's leading ids, as of the last lookup; they are not owned."""

    page_ids: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    """Number that each page stood for: all ids up to its end."""
    num_usable: int = 0
    """Leading pages that a sequence can begin on: all, or those up to the last with a snapshot of the states."""


_Key = tuple[int, tuple[int, ...]]
"""The node before a page, and the page's ids."""


@dataclass(slots=True)
class _Page:
    """One page, whoever owns it."""

    num_references: int = 0
    """Lists that hold it; 0 = it is free."""
    key: _Key | None = None
    """Key that it is found by; None until it is published."""
    node: int = _START
    """Number of a published page. It stands for all ids up to the page's end and is never used again."""


class PageTable:
    """Reference-counted pages of `page_size` slots. Page ids are [0, num_pages)."""

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_caching: bool = False, states: StateTable | None = None
    ) -> None:
        """`prefix_caching`: without it nothing is ever published. `states`: of a model with recurrent layers; each page
        list owns one."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages ({num_pages}) and page_size ({page_size}) must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._is_caching = prefix_caching
        self._states = states
        self._pages: list[_Page] = []
        """Records of the pages taken so far; a small model has millions of pages and needs few."""
        self._blank: list[int] = []
        """Pages of them that are free and without content; a stack, since the one freed last is the warmest."""
        self._left: OrderedDict[int, None] = OrderedDict()
        """Free pages with content, the longest left first."""
        self._published: dict[_Key, int] = {}
        """Page id by key."""
        self._num_nodes = 0

    @property
    def snapshots(self) -> Snapshots | None:
        """Snapshots of recurrent states; None of a model without."""
        return self._states.snapshots if self._states is not None else None

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return self.num_pages - len(self._pages) + len(self._blank) + len(self._left)

    def num_pages_for(self, length: int) -> int:
        """Pages that cover `length` slots."""
        return -(-length // self.page_size)

    def allocate(self, ids: Sequence[int]) -> tuple[PageList, int]:
        """Pages for a new sequence with these token ids, and how many of its leading ids already have KV.

        Raises:
            OutOfPagesError: nothing was allocated.
        """
        page_ids, _ = self._find(ids)
        num_cached = len(page_ids) * self.page_size
        try:
            self.extend(page_ids, len(ids))
        except OutOfPagesError:
            self.release(page_ids)
            raise
        return page_ids, num_cached

    def find(self, ids: Sequence[int]) -> PageList:
        """The published pages that hold as many leading ids as possible, now owned by the caller, too.

        For a model with states, the pages up to the last snapshot. The list then owns a state, which has seen
        them, and that state is kept at the end of the published pages, at their last whole page, and behind it.
        """
        page_ids, num_found = self._find(ids)
        if self.snapshots is not None and self.snapshots.num_snapshots:
            ends = {num_found, len(ids) // self.page_size} - set(range(len(page_ids) + 1))
            page_ids.borders = Borders((end * self.page_size for end in ends), len(ids))
        return page_ids

    def look(self, ids: Sequence[int], length: int, found: Found) -> None:
        """Bring `found` up to date, in place, with what `find` would give for the first `length` ids.

        It resumes at the end of the last lookup of the same text, so that frequent lookups are cheap.
        """
        # The pages after a page are forgotten before it. If the last page is unchanged, so are all before it.
        while found.nodes and self._pages[found.page_ids[-1]].node != found.nodes[-1]:
            found.page_ids.pop()
            found.nodes.pop()
        node = found.nodes[-1] if found.nodes else _START
        for end in range((len(found.nodes) + 1) * self.page_size, length + 1, self.page_size):
            page_id = self._published.get((node, tuple(ids[end - self.page_size : end])))
            if page_id is None:
                break
            node = self._pages[page_id].node
            found.page_ids.append(page_id)
            found.nodes.append(node)
        found.num_usable = self._num_usable(found.page_ids)

    def stop_before(self, page_ids: Sequence[int], start: int, end: int) -> int:
        """See `StateTable.stop_before`."""
        return self._states.stop_before(page_ids, start, end) if self._states is not None else end

    def publish(self, page_ids: list[int], ids: Sequence[int], length: int) -> None:
        """Publish the full pages among the first `length` slots; their KV belongs to `ids` from now on.

        A page that another one equals is replaced by it, in place. A state at a wanted position is kept.
        """
        self._publish(page_ids, ids, length)
        if self._is_caching and self._states is not None and isinstance(page_ids, PageList):
            self._states.save(page_ids, self.page_size)

    def _publish(self, page_ids: list[int], ids: Sequence[int], length: int) -> None:
        num_full = length // self.page_size
        if not self._is_caching or not num_full or self._pages[page_ids[num_full - 1]].key is not None:
            return
        first = num_full - 1
        while first > 0 and self._pages[page_ids[first - 1]].key is None:
            first -= 1
        node = self._pages[page_ids[first - 1]].node if first else _START
        for index in range(first, num_full):
            key = (node, tuple(ids[index * self.page_size : (index + 1) * self.page_size]))
            page_id = self._published.get(key)
            if page_id is None:
                page_id = page_ids[index]
                self._num_nodes += 1
                self._pages[page_id].key, self._pages[page_id].node = key, self._num_nodes
                self._published[key] = page_id
            else:
                self._own(page_id)
                self._drop(page_ids[index])
                page_ids[index] = page_id
            node = self._pages[page_id].node

    def can_extend(self, page_ids: Sequence[int], length: int) -> bool:
        """Whether `extend` with the same arguments would succeed."""
        if (
            self._states is not None
            and not self._states.num_free
            and not (isinstance(page_ids, PageList) and page_ids.state is not None)
        ):
            return False
        return self.num_pages_for(length) - len(page_ids) <= self.num_free

    def extend(self, page_ids: list[int], length: int) -> None:
        """Append pages, in place, until `length` slots are covered.

        Raises:
            OutOfPagesError: the list is unchanged.
        """
        num_needed = self.num_pages_for(length) - len(page_ids)
        if num_needed > 0 and not self.can_extend(page_ids, length):
            raise OutOfPagesError(num_needed, self.num_free)
        if self._states is not None:
            self._own_state(page_ids)
        for _ in range(num_needed):
            page_id = self._take()
            self._pages[page_id].num_references = 1
            page_ids.append(page_id)

    def num_freed(self, owners: Iterable[Sequence[int]]) -> int:
        """Pages that would become free if all these lists were released."""
        counted = Counter(page_id for page_ids in owners for page_id in page_ids)
        return sum(count == self._pages[page_id].num_references for page_id, count in counted.items())

    def release(self, page_ids: list[int]) -> None:
        """Drop every page of the list, and its state, and clear it."""
        if isinstance(page_ids, PageList) and page_ids.state is not None and self._states is not None:
            self._states.give_back(page_ids.state)
            page_ids.state = None
        while page_ids:
            self._drop(page_ids.pop())

    def num_references(self, page_id: int) -> int:
        """How many lists hold this page."""
        return self._pages[page_id].num_references if page_id < len(self._pages) else 0

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Re-derive the accounting from every live page list.

        Raises:
            IntegrityError: a page is leaked, free but owned, free twice, its count is wrong, or it is not the page that
                is found by its ids; or so for a state or a snapshot.
        """
        counted: Counter[int] = Counter()
        owned = []
        for page_ids in owners:
            counted.update(page_ids)
            if isinstance(page_ids, PageList) and page_ids.state is not None:
                owned.append(page_ids.state.index)
        if self._states is not None:
            self._states.check_integrity(owned)
            self._states.snapshots.check_integrity(set(self._published.values()))
        for page_id, page in enumerate(self._pages):
            if counted[page_id] != page.num_references:
                raise IntegrityError(f"page {page_id} has {page.num_references} references, {counted[page_id]} owners")
        expected_free = {page_id for page_id, page in enumerate(self._pages) if page.num_references == 0}
        num_free = len(self._blank) + len(self._left)
        if num_free != len(expected_free) or {*self._blank, *self._left} != expected_free:
            raise IntegrityError(f"{num_free} pages on the free lists, {len(expected_free)} unreferenced")
        if unknown := sorted(set(counted) - set(range(len(self._pages)))):
            raise IntegrityError(f"pages {unknown} do not exist or were never taken")
        keys = {page_id: page.key for page_id, page in enumerate(self._pages) if page.key is not None}
        if self._left.keys() != keys.keys() & expected_free:
            raise IntegrityError("pages with content and without are mixed up")
        if {page_id: key for key, page_id in self._published.items()} != keys:
            raise IntegrityError(f"{len(keys)} pages are published, {len(self._published)} can be found")

    def _find(self, ids: Sequence[int]) -> tuple[PageList, int]:
        """See `find`; also how many pages hold leading ids."""
        found = Found()
        self.look(ids, len(ids), found)
        num_usable = found.num_usable
        if self._states is not None and not self._states.num_free:
            num_usable = 0
        page_ids = PageList(found.page_ids[:num_usable])
        for page_id in page_ids:
            self._own(page_id)
        if self._states is not None and page_ids:
            page_ids.state = self._states.take_from(page_ids[-1], num_usable * self.page_size)
        return page_ids, len(found.page_ids)

    def _num_usable(self, page_ids: Sequence[int]) -> int:
        if self._states is None:
            return len(page_ids)
        snapshots = self._states.snapshots
        places = range(len(page_ids), 0, -1) if len(snapshots) else ()
        return next((place for place in places if page_ids[place - 1] in snapshots), 0)

    def _take(self) -> int:
        if self._blank:
            return self._blank.pop()
        if len(self._pages) == self.num_pages:
            return self._forget()
        self._pages.append(_Page())
        return len(self._pages) - 1

    def _own_state(self, page_ids: list[int]) -> None:
        assert self._states is not None
        if not isinstance(page_ids, PageList):
            raise TypeError("a model with recurrent states takes a PageList")
        if page_ids.state is None:
            if not self._states.num_free:
                raise OutOfPagesError(1, 0)
            page_ids.state = self._states.take()

    def _own(self, page_id: int) -> None:
        page = self._pages[page_id]
        if not page.num_references:
            del self._left[page_id]
        page.num_references += 1

    def _drop(self, page_id: int) -> None:
        if page_id >= len(self._pages) or self._pages[page_id].num_references < 1:
            raise IntegrityError(f"page {page_id} is released but has no owner")
        page = self._pages[page_id]
        page.num_references -= 1
        if not page.num_references and page.key is not None:
            self._left[page_id] = None
        elif not page.num_references:
            self._blank.append(page_id)

    def _forget(self) -> int:
        """The free page left longest ago, without its content; what followed it can no longer be found."""
        page_id, _ = self._left.popitem(last=False)
        page = self._pages[page_id]
        assert page.key is not None
        del self._published[page.key]
        if self._states is not None:
            self._states.snapshots.drop(page_id)
        page.key, page.node = None, _START
        return page_id
