"""Runs a batch through pipeline stages as several micro-batches, so that stages work at the same time.

A row's bits depend on its own sequence alone, so cuts do not change results.
"""

import numpy as np
import torch

from betoken.engine.batch import Batch
from betoken.engine.forward import Forward, StepOutput
from betoken.engine.rank_group import RankGroup

_MIN_ROWS = 32
"""Rows of a micro-batch. Fewer rows take about as long as these, since a forward reads all weights of a stage."""


def run(forward: Forward, batch: Batch, group: RankGroup) -> StepOutput:
    """Run a batch, in one micro-batch for each stage if it is long enough; all ranks together."""
    parts = micro_batches(batch, min(group.num_stages, batch.num_rows // _MIN_ROWS))
    if len(parts) == 1:
        return forward(batch)
    outputs = [forward(part).copy() for part in parts]
    features = [output.features for output in outputs if output.features is not None]
    return StepOutput(torch.cat([output.logits for output in outputs]), torch.cat(features) if features else None)


def micro_batches(batch: Batch, num_parts: int) -> list[Batch]:
    """Cut a batch into at most `num_parts` batches of about equal length, to be run in order."""
    places = _places(batch)
    wanted = [round(batch.num_rows * number / num_parts) for number in range(1, num_parts)]
    cuts = {int(places[np.abs(places - place).argmin()]) for place in wanted} if len(places) else set()
    borders = [0, *sorted(cuts), batch.num_rows]
    if len(borders) == 2:
        return [batch]
    return [_part(batch, start, stop) for start, stop in zip(borders, borders[1:], strict=False)]


def _places(batch: Batch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Rows before which the batch can be cut: all, or the first rows of segments if rows see later ones or are counted
    for a state."""
    visible, segments, *_ = batch.parts()
    places = np.arange(1, batch.num_rows)
    if batch.state_columns is None and np.array_equal(visible, batch.positions):
        return places
    return np.flatnonzero(segments[1:] != segments[:-1]) + 1


def _part(batch: Batch, start: int, stop: int) -> Batch:
    """Rows [start, stop) of a batch."""
    visible, segments, starts, page_ids, path_starts, slots = batch.parts()
    first, last = int(segments[start]), int(segments[stop - 1]) + 1
    layout = [visible[start:stop], segments[start:stop] - first, starts[first : last + 1] - starts[first]]
    layout.append(page_ids[starts[first] : starts[last]])
    has_trees = batch.has_trees and path_starts[stop] > path_starts[start]
    if has_trees:
        layout += [path_starts[start : stop + 1] - path_starts[start], slots[path_starts[start] : path_starts[stop]]]
    part = Batch(
        batch.token_ids[start:stop],
        batch.positions[start:stop],
        [row - start for row in batch.logit_rows if start <= row < stop],
        np.concatenate(layout).astype(np.int32),
        last - first,
        bool(has_trees),
    )
    if batch.state_columns is not None:
        part.state_columns = batch.state_columns[:, first:last].copy()
    if batch.adapters is not None:
        part.adapters = batch.adapters[first:last]
    return part
