"""Properties of the page accounting, and of what full pages hold, under any order of use."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from betoken.engine.errors import IntegrityError, OutOfPagesError
from betoken.engine.page_table import Found, PageTable


@dataclass
class Text:
    """A sequence: what it holds, and how much of it has KV."""

    ids: list[int]
    page_ids: list[int]
    kv_length: int


class Pool:
    """Texts over one table whose pages hold ids in place of KV."""

    def __init__(self, num_pages: int, page_size: int, is_caching: bool = True) -> None:
        self.table = PageTable(num_pages, page_size, prefix_caching=is_caching)
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.texts: list[Text] = []

    def slot(self, text: Text, position: int) -> int:
        size = self.table.page_size
        return text.page_ids[position // size] * size + position % size

    def begin(self, ids: list[int]) -> Text:
        page_ids, num_cached = self.table.allocate(ids)
        self.texts.append(Text(list(ids), page_ids, num_cached))
        return self.texts[-1]

    def write(self, text: Text, num_ids: int, num_guesses: int = 0) -> None:
        """KV of the next ids, and of drafts after them, which must not be found."""
        end = min(len(text.ids), text.kv_length + num_ids)
        self.table.extend(text.page_ids, end + num_guesses)
        for position in range(text.kv_length, end + num_guesses):
            self.slots[self.slot(text, position)] = text.ids[position] if position < end else -1
        text.kv_length = end
        self.table.publish(text.page_ids, text.ids, text.kv_length)

    def release(self, text: Text) -> None:
        self.table.release(text.page_ids)
        self.texts = [other for other in self.texts if other is not text]

    def check(self) -> None:
        self.table.check_integrity(text.page_ids for text in self.texts)
        for text in self.texts:
            held = [self.slots[self.slot(text, position)] for position in range(text.kv_length)]
            assert held == text.ids[: text.kv_length]


_IDS = st.lists(st.integers(0, 1), max_size=24)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 5),
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["begin", "write", "append", "release", "find", "look"]), st.integers(0, 40), _IDS),
        max_size=60,
    ),
)
def test_every_page_list_holds_its_own_ids_after_every_operation(
    num_pages: int, page_size: int, is_caching: bool, operations: list[tuple[str, int, list[int]]]
) -> None:
    pool = Pool(num_pages, page_size, is_caching)
    looks: list[tuple[list[int], Found]] = [([], Found()) for _ in range(3)]
    for name, number, ids in operations:
        text = pool.texts[number % len(pool.texts)] if pool.texts else None
        before, num_free_before = [list(other.page_ids) for other in pool.texts], pool.table.num_free
        try:
            if name == "begin":
                assert is_caching or pool.table.find(ids) == []
                pool.begin(ids)
            elif name == "find":
                found = pool.table.find(ids)
                assert found == pool.table.find(ids), "found pages stay in place"
                pool.table.release(list(found))
                num_freed = pool.table.num_freed([found])
                num_free = pool.table.num_free
                pool.table.release(found)
                assert pool.table.num_free == num_free + num_freed
            elif name == "look":
                waiting, seen = looks[number % 3]
                waiting += ids
                pool.table.look(waiting, len(waiting), seen)
                found = pool.table.find(waiting)
                assert seen.page_ids == found
                pool.table.release(found)
            elif text is None:
                continue
            elif name == "append":
                text.ids += ids
            elif name == "write":
                pool.write(text, number, len(ids) % 4)
            else:
                pool.release(text)
        except OutOfPagesError as error:
            # Found pages without an owner were not free while the others were needed.
            assert error.num_needed > error.num_free and pool.table.num_free == num_free_before
            assert [other.page_ids for other in pool.texts] == before
        pool.check()
    for text in list(pool.texts):
        pool.release(text)
    pool.check()
    assert pool.table.num_free == num_pages


def test_a_text_with_a_cached_prefix_starts_with_its_pages() -> None:
    pool = Pool(num_pages=8, page_size=4)
    first = pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9])
    pool.write(first, 9)
    second = pool.begin([1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert second.kv_length == 4 and second.page_ids[0] == first.page_ids[0]
    assert pool.table.num_references(first.page_ids[0]) == 2
    assert second.page_ids[1] != first.page_ids[1], "one id of it differs"
    pool.release(first)
    pool.release(second)
    third = pool.begin([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert third.kv_length == 8, "pages without an owner are found, too; the last page was not full"


def test_equal_pages_become_one() -> None:
    pool = Pool(num_pages=8, page_size=2)
    first, second = pool.begin([1, 2, 3, 4]), pool.begin([1, 2, 3, 4])
    pool.write(first, 4)
    pool.write(second, 4)
    pool.check()
    assert first.page_ids == second.page_ids and pool.table.num_free == 6


def test_the_last_pages_of_the_oldest_text_are_evicted_first() -> None:
    pool = Pool(num_pages=4, page_size=2)
    for ids in ([1, 1, 1, 1], [2, 2, 2, 2]):
        text = pool.begin(ids)
        pool.write(text, 4)
        pool.release(text)
    blank = pool.begin([3])  # takes the end of the first text
    assert [len(pool.table.find(ids)) for ids in ([1, 1, 1, 1], [2, 2, 2, 2])] == [1, 2]
    assert pool.table.num_references(blank.page_ids[0]) == 1


def test_without_prefix_caching_no_pages_are_found() -> None:
    pool = Pool(num_pages=4, page_size=2, is_caching=False)
    pool.write(pool.begin([1, 1, 1, 1]), 4)
    assert pool.table.find([1, 1, 1, 1]) == []


def test_the_integrity_check_of_pages_names_the_fault() -> None:
    table = PageTable(4, 16)
    page_ids, _ = table.allocate(range(20))
    with pytest.raises(IntegrityError, match="references"):
        table.check_integrity([])
    table.check_integrity([page_ids])
    stale = list(page_ids)
    table.release(page_ids)
    with pytest.raises(IntegrityError, match="no owner"):
        table.release(stale)
