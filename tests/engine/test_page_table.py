"""Properties of the page accounting under any order of use."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.engine.errors import IntegrityError, OutOfPagesError
from foretoken.engine.page_table import PageTable


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 24),
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["new", "extend", "shrink", "share", "release"]), st.integers(0, 40)), max_size=40
    ),
)
def test_accounting_holds_after_every_operation(
    num_pages: int, page_size: int, operations: list[tuple[str, int]]
) -> None:
    table = PageTable(num_pages, page_size)
    owners: list[list[int]] = []
    for name, number in operations:
        owner = owners[number % len(owners)] if owners else None
        try:
            if name == "new":
                owners.append(table.allocate(range(number))[0])
            elif owner is None:
                continue
            elif name == "extend":
                can = table.can_extend(owner, number)
                before = list(owner)
                try:
                    table.extend(owner, number)
                    assert can and len(owner) * page_size >= number and owner[: len(before)] == before
                except OutOfPagesError:
                    assert not can and owner == before
            elif name == "shrink":
                table.shrink(owner, number)
                assert len(owner) <= table.num_pages_for(number)
            elif name == "share":
                owners.append(table.share(owner, min(number, len(owner) * page_size)))
            else:
                table.release(owner)
                assert owner == []
        except OutOfPagesError as error:
            assert error.num_needed > error.num_free == table.num_free
        table.check_integrity(owners)
    for owner in owners:
        table.release(owner)
    table.check_integrity([])
    assert table.num_free == num_pages


def test_a_live_page_has_exactly_its_owners() -> None:
    table = PageTable(4, 16)
    first, num_cached = table.allocate(range(33))
    assert (len(first), num_cached, table.num_free) == (3, 0, 1)
    second = table.share(first, 33)
    assert second == first[:2]  # the third page is not full: it may still be written
    table.release(first)
    assert table.num_free == 2
    table.release(second)
    assert table.num_free == 4


def test_integrity_names_what_is_wrong() -> None:
    table = PageTable(4, 16)
    page_ids, _ = table.allocate(range(20))
    with pytest.raises(IntegrityError, match="references"):
        table.check_integrity([])
    table.check_integrity([page_ids])
    stale = list(page_ids)
    table.release(page_ids)
    with pytest.raises(IntegrityError, match="no owner"):
        table.release(stale)
