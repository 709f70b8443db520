"""Snapshots of recurrent states: whatever is found, kept and forgotten, a state has seen what its pages hold."""

import random

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from betoken.engine.batch import Segment, note_applied, state_columns
from betoken.engine.errors import IntegrityError
from betoken.engine.page_table import PageTable
from betoken.engine.state_table import PageList, StateTable

WAITING = 9


class Model:
    """Ids covered by states and snapshots, with a page table: a model without numbers."""

    def __init__(self, num_pages: int, page_size: int, num_snapshots: int) -> None:
        self.table = PageTable(
            num_pages, page_size, prefix_caching=True, states=StateTable(20, num_snapshots, num_waiting=WAITING)
        )
        self.states: dict[int, list[int]] = {}
        self.kept: dict[int, list[int]] = {}

    def start(self, ids: list[int]) -> tuple[PageList, int]:
        """Pages for a text, and how many of its tokens are known; the state has seen these."""
        page_ids = self.table.find(ids[:-1])
        known = len(page_ids) * self.table.page_size
        if not self.table.can_extend(page_ids, len(ids)):
            self.table.release(page_ids)
            return page_ids, -1
        self.table.extend(page_ids, len(ids))
        self._copy()
        if known:
            assert page_ids.state is not None and page_ids.state.num_applied == known
            assert self.states[page_ids.state.index] == ids[:known]
        return page_ids, known

    def forward(self, page_ids: PageList, ids: list[int], length: int, num_rows: int, num_drafts: int) -> None:
        """A chunk of the text, with drafts behind it that no state may see."""
        segment = Segment(page_ids, length, [*ids[length : length + num_rows], *[-1] * num_drafts], 0)
        segment.num_committed = length + num_rows
        columns = state_columns([segment], WAITING, self.table.page_size)
        self._copy()
        kept = int(columns[3, 0])
        assert segment.end - kept <= WAITING and page_ids.state is not None
        self.states[page_ids.state.index] = ids[:kept]
        note_applied([segment], columns)
        self.table.publish(page_ids, ids, length + num_rows)

    def _copy(self) -> None:
        assert self.table.snapshots is not None
        for copy in self.table.snapshots.take_copies():
            if copy.is_restore:
                assert len(self.kept[copy.snapshot]) == copy.length
                self.states[copy.state] = self.kept[copy.snapshot]
            else:
                assert len(self.states[copy.state]) == copy.length
                self.kept[copy.snapshot] = self.states[copy.state]


def compute(model: Model, ids: list[int], num_prompt: int, rng: random.Random | None = None) -> int:
    """Run a text through the model and give its pages back; how many of its tokens were known."""
    page_ids, length = model.start(ids[:num_prompt])
    known = length
    while 0 <= length < len(ids):
        end = min(len(ids), length + (rng.randrange(1, 8) if rng else 6))
        if length < num_prompt - 1:
            end = min(end, num_prompt - 1)
        end = model.table.stop_before(page_ids, length, end)
        num_drafts = rng.randrange(4) if rng and end == len(ids) else 0
        if not model.table.can_extend(page_ids, end + num_drafts):
            break
        model.table.extend(page_ids, end + num_drafts)
        model.forward(page_ids, ids, length, end - length, num_drafts)
        length = end
    model.table.release(page_ids)
    return known


@examples(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_the_state_of_a_snapshot_has_seen_the_ids_of_its_pages(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    model = Model(rng.randrange(12, 40), size, rng.randrange(2, 6))
    texts = [[rng.randrange(3) for _ in range(rng.randrange(2, 30))] for _ in range(3)]
    for _ in range(40):
        text = rng.choice(texts)
        ids = text[: rng.randrange(1, len(text) + 1)] + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        compute(model, ids, rng.randrange(1, len(ids) + 1), rng)
        model.table.check_integrity([])
    ids = [0] * (2 * size + 1)
    assert [compute(model, ids, len(ids)) for _ in range(2)][1] == 2 * size


def test_a_repeated_prompt_begins_at_the_snapshot_of_its_last_whole_page() -> None:
    model = Model(32, 4, 8)
    prompt = list(range(19))
    assert [compute(model, prompt, 19) for _ in range(3)] == [0, 16, 16]


def test_a_snapshot_where_prompts_part_is_kept_when_the_second_passes_it() -> None:
    model = Model(64, 4, 8)
    shared = list(range(18))
    prompts = [[*shared, *[20 + n] * 8] for n in range(3)]
    assert [compute(model, prompt, 26) for prompt in prompts] == [0, 0, 16]


def test_the_next_turn_begins_at_the_snapshot_of_the_answers_end() -> None:
    model = Model(32, 4, 3)
    conversation = list(range(40))
    assert compute(model, conversation[:22], 10) == 0  # twelve tokens of it are the answer
    assert compute(model, conversation, 30) == 20
    assert model.table.snapshots is not None and len(model.table.snapshots) == 3


def test_the_least_recently_used_snapshot_is_evicted() -> None:
    model = Model(64, 4, 2)
    texts = [[n] * 9 for n in range(3)]
    assert [compute(model, text, 9) for text in texts[:2]] == [0, 0]
    assert compute(model, texts[0], 9) == 8
    assert [compute(model, text, 9) for text in (texts[2], texts[0], texts[1])] == [0, 8, 0]


def test_a_snapshot_is_freed_with_its_page() -> None:
    model = Model(6, 4, 8)
    compute(model, list(range(12)), 12)
    compute(model, list(range(50, 74)), 24)  # takes all pages
    assert compute(model, list(range(12)), 12) == 0
    model.table.check_integrity([])


def test_a_prefill_chunk_stops_at_a_snapshot_point() -> None:
    model = Model(64, 4, 8)
    page_ids, _ = model.start(list(range(32)))
    assert model.table.stop_before(page_ids, 0, 32) == 32  # 28 is kept on the way: four tokens can wait
    assert model.table.stop_before(page_ids, 0, 28 + WAITING) == 28 + WAITING
    assert model.table.stop_before(page_ids, 0, 29 + WAITING) == 28


def test_leaked_snapshots_are_found() -> None:
    model = Model(8, 4, 2)
    compute(model, list(range(9)), 9)
    snapshots = model.table.snapshots
    assert snapshots is not None
    snapshots._of_page[7] = snapshots._of_page.popitem()[1]
    with pytest.raises(IntegrityError, match="not published"):
        model.table.check_integrity([])
    snapshots._of_page.clear()
    with pytest.raises(IntegrityError, match="there are 2"):
        model.table.check_integrity([])


def test_without_snapshots_no_prefix_is_found() -> None:
    model = Model(32, 4, 0)
    assert [compute(model, list(range(20)), 20) for _ in range(2)] == [0, 0]
