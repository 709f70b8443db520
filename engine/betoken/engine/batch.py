"""A flat, ragged batch: the new tokens of many sequences in one row. Plain ints and arrays, so it can be broadcast.

It knows page lists and positions, not the model, its tensors or who asked.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from betoken.common.tree import num_sound
from betoken.engine.state_table import PageList
from betoken.engine.tree import place_nodes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Segment:
    """New tokens of one sequence in a forward; they take slots [kv_length, kv_length + len(ids)).

    `page_ids` cover at least kv_length + len(ids) slots. The last `num_logits` rows yield logits: 0 for a prefill
    chunk that is not the last.

    `parents` makes a tree of the sequence's last len(parents) slots, whether earlier forwards wrote them or this one.
    parents[i] is the index of node i's parent among them, -1 for the slot before the first of them. Node i then takes
    the position after its parent's. All slots before, and all slots without `parents`, are a chain.
    """

    page_ids: Sequence[int]
    kv_length: int
    ids: Sequence[int]
    num_logits: int
    parents: Sequence[int] | None = None
    _: KW_ONLY
    num_mutual: int = 0
    """Last new tokens that see each other, later ones included (the block of a diffusion drafter); not with `parents`.
    Others see what is before them."""
    adapter: int = 0
    """Number of the sequence's adapter for linear layers that have any (`StepContext.token_adapters`); 0 for none."""
    num_committed: int | None = None
    """Leading tokens of the sequence that no result will reject, for recurrent states; None = all before a tree."""
    added: "Tensor | None" = field(default=None, compare=False)
    """Vectors [len(ids), H] that are added to the embeddings of the new tokens, in the model's dtype and on its device
    (`EngineConfig.adds_to_embeddings`); None for none."""

    @property
    def end(self) -> int:
        """Slots of the sequence after the forward."""
        return self.kv_length + len(self.ids)

    @property
    def num_kept(self) -> int:
        """`num_committed`, or its default."""
        if self.num_committed is not None:
            return min(self.num_committed, self.end)
        return self.end - len(self.parents or ())


@dataclass(slots=True)
class Batch:
    """R rows of S segments.

    `layout` holds, one after the other: last visible positions [R], which are the rows' own but for mutual tokens,
    row_segments [R] (ascending), page_starts [S + 1], page_ids;
    segment s owns the page ids [page_starts[s], page_starts[s + 1]). With trees the starts [R + 1] and slots of
    `betoken.kernels.rows.TreePaths` follow.
    """

    token_ids: list[int]  # [R]
    positions: list[int]  # [R]
    logit_rows: list[int]  # [L], ascending
    layout: npt.NDArray[np.int32]
    num_segments: int
    has_trees: bool
    state_columns: npt.NDArray[np.int32] | None = None
    """For models with recurrent states: states, applied, first_slots and committed of `StateRows`, [4, S]."""

    adapters: tuple[int, ...] | None = None
    """`Segment.adapter` of each segment [S]; None if all are 0."""
    added: "Tensor | None" = field(default=None, compare=False)
    """`Segment.added` of all rows [R, H], zero for segments without; None if no segment has any. Not broadcast."""

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    def parts(self) -> list[npt.NDArray[np.int32]]:
        """The six parts of `layout` in their order; the last two are empty without trees."""
        num_rows, num_starts = self.num_rows, self.num_segments + 1
        num_page_ids = int(self.layout[2 * num_rows + self.num_segments])
        sizes = (num_rows, num_rows, num_starts, num_page_ids, num_rows + 1 if self.has_trees else 0)
        return np.split(self.layout, np.cumsum(sizes))

    def token_adapters(self, has_logits: bool = False) -> npt.NDArray[np.int64]:
        """`Segment.adapter` of each token [R], or of those with logits [L]."""
        segments = self.layout[self.num_rows : 2 * self.num_rows]
        found = np.array(self.adapters or (0,) * self.num_segments, np.int64)[segments]
        return found[self.logit_rows] if has_logits else found


def build_batch(segments: Sequence[Segment], page_size: int, max_rows: int) -> Batch:
    """Flatten segments.

    Raises:
        ValueError: a segment is empty, wants more logits than rows, has too few pages or impossible parents; or there
            are too many rows.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    row_segments: list[int] = []
    page_starts = [0]
    page_ids: list[int] = []
    logit_rows: list[int] = []
    paths: dict[int, list[int]] = {}  # row -> slots of its last positions
    for index, segment in enumerate(segments):
        _check_segment(segment, index, page_size)
        num_new = len(segment.ids)
        end = segment.kv_length + num_new
        token_ids.extend(segment.ids)
        if segment.parents is None:
            positions.extend(range(segment.kv_length, end))
        else:
            tree_start = end - len(segment.parents)
            placed, forked = place_nodes(segment.parents, tree_start, first_node=segment.kv_length - tree_start)
            paths.update((len(positions) + num_new - len(placed) + node, path) for node, path in forked.items())
            positions.extend(range(segment.kv_length, tree_start))
            positions.extend(placed)
        if segment.num_mutual:
            paths.update(_mutual_paths(len(positions), end, segment.num_mutual))
        row_segments.extend([index] * num_new)
        page_ids.extend(segment.page_ids[: -(-end // page_size)])
        page_starts.append(len(page_ids))
        logit_rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
    if not 1 <= len(token_ids) <= max_rows:
        raise ValueError(f"segments: {len(token_ids)} rows, a forward holds 1 to {max_rows}")
    numbers = _last_visible(positions, segments) + row_segments + page_starts + page_ids
    if paths:
        numbers += _flatten_paths(paths, len(positions))
    adapters = tuple(segment.adapter for segment in segments)
    layout = np.array(numbers, np.int32)
    batch = Batch(token_ids, positions, logit_rows, layout, len(segments), bool(paths))
    batch.adapters = adapters if any(adapters) else None
    return batch


def _last_visible(positions: list[int], segments: Sequence[Segment]) -> list[int]:
    """Last position that each row sees: its own, or the last of its mutual tokens."""
    if not any(segment.num_mutual for segment in segments):
        return positions
    found, row = positions.copy(), 0
    for segment in segments:
        row += len(segment.ids)
        found[row - segment.num_mutual : row] = [segment.end - 1] * segment.num_mutual
    return found


def _mutual_paths(num_rows: int, end: int, num_mutual: int) -> dict[int, list[int]]:
    """Slots of each of the last rows' last `num_mutual` positions: all their slots, with the row's own slot last."""
    slots = range(end - num_mutual, end)
    return {num_rows - end + own: [*(slot for slot in slots if slot != own), own] for own in slots[:-1]}


def _flatten_paths(paths: dict[int, list[int]], num_rows: int) -> list[int]:
    """Starts [R + 1], then slots, of rows in order."""
    starts = [0]
    slots: list[int] = []
    for row in range(num_rows):
        slots += paths.get(row, ())
        starts.append(len(slots))
    return starts + slots


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
    if not 0 <= segment.num_mutual <= num_new or (segment.num_mutual and segment.parents is not None):
        raise ValueError(f"segments[{index}].num_mutual: {segment.num_mutual} of {num_new} new tokens, without parents")
    num_parents = 0 if segment.parents is None else len(segment.parents)
    if num_parents > segment.kv_length + num_new:
        raise ValueError(f"segments[{index}].parents: {num_parents} nodes in {segment.kv_length + num_new} slots")
    if segment.parents is not None and (node := num_sound(segment.parents)) < num_parents:
        raise ValueError(f"segments[{index}].parents[{node}]: {segment.parents[node]} is outside [-1, {node})")


def state_columns(segments: Sequence[Segment], num_waiting: int, page_size: int) -> npt.NDArray[np.int32]:
    """States, applied, first_slots and committed of `StateRows` [4, S]; state 0 for lists that own none.

    A state stops at the last border at which it must be kept, if later tokens can wait.

    Raises:
        ValueError: a sequence goes back before what its state has seen, or more than `num_waiting` tokens wait.
    """
    columns: list[tuple[int, int, int, int]] = []
    for index, segment in enumerate(segments):
        own = segment.page_ids.state if isinstance(segment.page_ids, PageList) else None
        applied = own.num_applied if own is not None and segment.kv_length else 0
        kept = _kept(segment, applied, num_waiting, page_size)
        if own is None:
            applied = kept = segment.kv_length
        if segment.kv_length < applied:
            raise ValueError(
                f"segments[{index}].kv_length: {segment.kv_length} is below {applied}, which its state has seen"
            )
        waiting = max(segment.end - kept, segment.kv_length - applied)
        if own is not None and waiting > num_waiting:
            raise ValueError(f"segments[{index}]: {waiting} tokens after {kept} committed ones, {num_waiting} can wait")
        columns.append((own.index if own is not None else 0, applied, segment.kv_length, kept))
    return np.array(columns, np.int32).T.copy()


def _kept(segment: Segment, applied: int, num_waiting: int, page_size: int) -> int:
    kept = max(applied, segment.num_kept)
    borders = segment.page_ids.borders if isinstance(segment.page_ids, PageList) else None
    border = borders.last(applied, kept, page_size) if borders is not None else None
    return kept if border is None or segment.end - border > num_waiting else border


def note_applied(segments: Sequence[Segment], columns: npt.NDArray[np.int32]) -> None:
    """Count what a forward has applied to the states."""
    for segment, kept in zip(segments, columns[3].tolist(), strict=True):
        if isinstance(segment.page_ids, PageList) and segment.page_ids.state is not None:
            segment.page_ids.state.num_applied = kept
