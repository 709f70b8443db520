"""A batch in persistent memory: padding has no owner, nothing of an earlier batch is left, paths are found."""

import torch

from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.cuda.step_inputs import StepInputs

SCRATCH_PAGE = 24


def make(num_rows: int = 8, num_logits: int = 8, tail_size: int = 40) -> StepInputs:
    return StepInputs(num_rows, num_logits, tail_size, SCRATCH_PAGE, torch.device("cpu"))


def batch(*segments: Segment) -> Batch:
    return build_batch(segments, page_size=4, max_rows=64)


def pages(inputs: StepInputs) -> list[list[int]]:
    """The page ids of every row's sequence."""
    rows = inputs.make_rows(64)
    starts = rows.page_starts.tolist()
    return [rows.page_ids[starts[segment] : starts[segment + 1]].tolist() for segment in rows.row_segments.tolist()]


def test_padding_rows_belong_to_no_sequence_and_leave_no_values() -> None:
    inputs = make()
    inputs.fill(batch(Segment([9, 8, 7], 2, [50, 51, 52, 53, 54], 5), Segment([6], 0, [60], 1)))
    assert pages(inputs) == [[9, 8]] * 5 + [[6]] + [[SCRATCH_PAGE]] * 2
    inputs.fill(batch(Segment([5, 4], 3, [1, 2], 1)))
    assert inputs.token_ids.tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    assert inputs.logit_rows.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [3, 4, 0, 0, 0, 0, 0, 0]
    assert pages(inputs) == [[5, 4]] * 2 + [[SCRATCH_PAGE]] * 6
    paths = inputs.make_rows(64).paths
    assert paths is not None and paths.starts.diff().tolist() == [0] * 8


def test_all_rows_are_padding_until_the_first_batch() -> None:
    inputs = make()
    rows = inputs.make_rows(64)
    page_of_first_slot = rows.page_ids[rows.page_starts[rows.row_segments.long()].long()]
    assert page_of_first_slot.tolist() == [SCRATCH_PAGE] * 8
    assert rows.own_slots().tolist() == [0] * 8


def test_paths_of_a_tree_are_found_behind_the_pages() -> None:
    inputs = make()
    inputs.fill(batch(Segment([5, 4], 3, [1, 2, 3], 3, parents=[-1, -1, 1])))
    rows = inputs.make_rows(64)
    assert rows.paths is not None
    starts, slots = rows.paths.starts.tolist(), rows.paths.slots.tolist()
    paths = [slots[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    assert paths == [[], [4], [4, 5]] + [[]] * 5
    assert inputs.make_rows(64).own_slots().tolist() == [3, 4, 5, 0, 0, 0, 0, 0]
    inputs.fill(batch(Segment([5, 4], 3, [1], 1)))
    assert inputs.make_rows(64).own_slots().tolist() == [3, 0, 0, 0, 0, 0, 0, 0]


def test_a_batch_that_does_not_fit_the_step_inputs_is_reported() -> None:
    inputs = make(num_rows=4, num_logits=2, tail_size=5)
    assert inputs.fits(batch(Segment([0, 1, 2, 3], 12, [1, 2], 2)))
    assert not inputs.fits(batch(Segment([0, 1], 0, [1] * 5, 2))), "rows"
    assert not inputs.fits(batch(Segment([0, 1], 0, [1] * 4, 3))), "logits"
    assert not inputs.fits(batch(Segment([0, 1, 2, 3, 4], 16, [1], 1))), "pages"
    assert not inputs.fits(batch(Segment([0, 1, 2], 9, [1, 1, 1], 1, parents=[-1, -1, 1]))), "slots of paths"


def test_step_inputs_of_one_batch_have_its_size() -> None:
    inputs = StepInputs.for_batch(batch(Segment([5, 4], 3, [1, 2], 0)), SCRATCH_PAGE, torch.device("cpu"))
    token_ids, positions, logit_rows = inputs.model_arguments()
    assert (token_ids.tolist(), positions.tolist(), logit_rows.tolist()) == ([[1, 2]], [[3, 4]], [0])
    assert {tensor.dtype for tensor in (token_ids, positions, logit_rows)} == {torch.int64}


def test_every_column_of_the_step_inputs_is_aligned() -> None:
    for num_rows in range(1, 9):
        inputs = make(num_rows, num_rows)
        rows = inputs.make_rows(64)
        assert rows.paths is not None
        columns = (rows.positions, rows.row_segments, rows.page_starts, rows.page_ids, rows.paths.starts)
        assert {(column.data_ptr() - inputs.token_ids.data_ptr()) % 16 for column in columns} == {0}
