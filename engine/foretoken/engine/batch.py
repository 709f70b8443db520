"""A flat, ragged batch: the new tokens of many sequences in one row. Plain ints and arrays, so it can be broadcast.

It knows page lists and positions, not the model, its tensors or who asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True)
class Segment:
    """New tokens of one sequence in a forward; they take positions [kv_length, kv_length + len(ids)).

    `page_ids` cover at least kv_length + len(ids) slots. The last `num_logits` rows yield logits: 0 for a prefill
    chunk that is not the last. `parents` is for tree blocks: only the chain (parent of row i is row i - 1) is taken.
    """

    page_ids: Sequence[int]
    kv_length: int
    ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None


@dataclass(slots=True)
class Batch:
    """R rows of S segments.

    `layout` holds, one after the other: positions [R], row_segments [R] (ascending), page_starts [S + 1], page_ids;
    segment s owns the page ids [page_starts[s], page_starts[s + 1]).
    """

    token_ids: list[int]  # [R]
    positions: list[int]  # [R]
    logit_rows: list[int]  # [L], ascending
    layout: npt.NDArray[np.int32]
    num_segments: int

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


def build_batch(segments: Sequence[Segment], page_size: int, max_rows: int) -> Batch:
    """Flatten segments.

    Raises:
        ValueError: a segment is empty, a tree, wants more logits than rows or has too few pages; or too many rows.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    row_segments: list[int] = []
    page_starts = [0]
    page_ids: list[int] = []
    logit_rows: list[int] = []
    for index, segment in enumerate(segments):
        _check_segment(segment, index, page_size)
        num_new = len(segment.ids)
        end = segment.kv_length + num_new
        token_ids.extend(segment.ids)
        positions.extend(range(segment.kv_length, end))
        row_segments.extend([index] * num_new)
        page_ids.extend(segment.page_ids[: -(-end // page_size)])
        page_starts.append(len(page_ids))
        logit_rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
    if not 1 <= len(token_ids) <= max_rows:
        raise ValueError(f"segments: {len(token_ids)} rows, a forward holds 1 to {max_rows}")
    layout = np.array(positions + row_segments + page_starts + page_ids, np.int32)
    return Batch(token_ids, positions, logit_rows, layout, len(segments))


def _check_segment(segment: Segment, index: int, page_size: int) -> None:
    num_new = len(segment.ids)
    if num_new < 1 or segment.kv_length < 0:
        raise ValueError(f"segments[{index}]: {num_new} ids at kv_length {segment.kv_length}; at least 1 at 0 or more")
    if not 0 <= segment.num_logits <= num_new:
        raise ValueError(f"segments[{index}].num_logits: {segment.num_logits} is outside [0, {num_new}]")
    if len(segment.page_ids) * page_size < segment.kv_length + num_new:
        raise ValueError(
            f"segments[{index}].page_ids: {len(segment.page_ids)} pages of {page_size} slots do not cover"
            f" {segment.kv_length + num_new} slots"
        )
    if segment.parents is not None and list(segment.parents) != list(range(-1, num_new - 1)):
        raise ValueError(f"segments[{index}].parents: only chains are supported, not trees")
