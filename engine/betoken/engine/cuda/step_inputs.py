"""Tensors that hold any batch up to a number of rows, always in the same memory, filled by one copy to the device.

All are int32 and follow each other: token_ids [B], positions [B], last visible positions [B], row_segments [B],
adapters [B], logit_rows [L], page_starts [B + 2], path_starts [B + 1], tail. The tail holds the page
ids, then the slots of tree paths, so that only what a batch uses of it is copied. Rows beyond the batch are padding:
token 0 at position 0 of a page of no sequence.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from betoken.engine.batch import Batch
from betoken.kernels.rows import PagedRows, TreePaths


class StepInputs:
    """Device tensors of one forward of exactly `num_rows` rows, `num_logits` of which yield logits."""

    def __init__(self, num_rows: int, num_logits: int, tail_size: int, scratch_page: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._num_logits = num_logits
        self._scratch_page = scratch_page
        sizes = (num_rows, num_rows, num_rows, num_rows, num_rows, num_logits, num_rows + 2, num_rows + 1, tail_size)
        bounds = list(accumulate((_aligned(size) for size in sizes), initial=0))
        places = [slice(start, start + size) for start, size in zip(bounds, sizes, strict=False)]
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(bounds[-1], dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(bounds[-1], dtype=torch.int32, device=device)
        self._columns = [self._host.numpy()[place] for place in places]
        self._tail_start = bounds[-2]
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        parts = [self._device[place] for place in places]
        parts[-1].fill_(scratch_page)  # until it is filled, all rows are padding
        self.token_ids, self.positions, self._last_visible, self._row_segments, *others = parts
        self._adapters, self.logit_rows, *self._starts, self._tail = others

    @classmethod
    def for_batch(cls, batch: Batch, scratch_page: int, device: torch.device) -> "StepInputs":
        """Inputs of just this batch's size, filled."""
        inputs = cls(batch.num_rows, max(1, len(batch.logit_rows)), _tail_length(batch), scratch_page, device)
        inputs.fill(batch)
        return inputs

    def fits(self, batch: Batch) -> bool:
        """Whether `fill` can take the batch."""
        return (
            batch.num_rows <= self._num_rows
            and len(batch.logit_rows) <= self._num_logits
            and _tail_length(batch) <= len(self._columns[-1])
        )

    def fill(self, batch: Batch) -> None:
        """Put a batch that fits in place; the copy is ordered with what the current stream runs next."""
        if self._copied is not None:
            self._copied.synchronize()  # the device may still be reading what was filled in last
        last_visible, row_segments, page_starts, page_ids, starts, slots = batch.parts()
        num_tail = _tail_length(batch)
        num_page_ids = len(page_ids) + 1
        tail = self._columns[-1]
        tail[: len(page_ids)] = page_ids
        tail[len(page_ids)] = self._scratch_page
        tail[num_page_ids:num_tail] = slots
        path_starts = starts + num_page_ids
        filled: tuple[tuple[Sequence[int] | npt.NDArray[np.int32], int], ...] = (
            (batch.token_ids, 0),
            (batch.positions if batch.has_trees else last_visible, 0),
            (last_visible, 0),
            (row_segments, batch.num_segments),
            ([] if batch.adapters is None else batch.token_adapters().astype(np.int32), 0),
            (batch.logit_rows, 0),
            (page_starts, num_page_ids),
            (path_starts, int(path_starts[-1]) if batch.has_trees else 0),
        )
        for column, (values, padding) in zip(self._columns[:-1], filled, strict=True):
            column[: len(values)] = values
            column[len(values) :] = padding
        num_used = self._tail_start + num_tail
        self._device[:num_used].copy_(self._host[:num_used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def make_rows(self, max_length: int) -> PagedRows:
        """Places of the rows and their keys; a new object each time, since it keeps values derived from the batch.

        `max_length` bounds every sequence's length. The tail serves as page ids and as slots: starts lead to both.
        """
        page_starts, path_starts = self._starts
        paths = TreePaths(path_starts, self._tail)
        return PagedRows(self._last_visible, self._row_segments, page_starts, self._tail, paths, max_length)

    def token_adapters(self, has_logits: bool) -> Tensor:
        """`Segment.adapter` of each token [B], or of those with logits [L]."""
        return self._adapters[self.logit_rows.long()] if has_logits else self._adapters

    def model_arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of a `ModelCall`, int64, made on the device."""
        return self.token_ids.long()[None], self.positions.long()[None], self.logit_rows.long()


def _tail_length(batch: Batch) -> int:
    """The batch's page ids, the scratch page, and the slots of its paths."""
    num_starts = batch.num_segments + 1 + (batch.num_rows + 1 if batch.has_trees else 0)
    return len(batch.layout) - 2 * batch.num_rows - num_starts + 1


def _aligned(size: int) -> int:
    """Every column starts at a multiple of 16 bytes: kernels are compiled anew for pointers of another alignment."""
    return -(-size // 4) * 4
