"""Places of a flat ragged batch's rows in the paged KV cache. Shared by the attention and KV kernels.

Positions are logical: the number of tokens before a row on its own path. Slots are physical: the order of writing. For
a chain both are the same number; for the nodes of a draft tree they are not.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class TreePaths:
    """The slots of rows in draft trees.

    For row r, with n = starts[r + 1] - starts[r], the last n positions (its own included) are in the slots
    `slots[starts[r] : starts[r + 1]]` of its sequence, in order of position. Earlier positions t are in slot t. A row
    whose path is contiguous has n = 0. Every row finds its keys by position, and siblings never see each other.
    """

    starts: Tensor  # [R + 1] int32
    slots: Tensor  # int32


@dataclass(slots=True)
class PagedRows:
    """R rows of S sequences; sequence s owns pages `page_ids[page_starts[s] : page_starts[s + 1]]`.

    Slot t of sequence s is in page `page_ids[page_starts[s] + t // page_size]`, offset t % page_size.
    All tensors are int32 and on the device of the caches.

    Raises:
        ValueError: a dtype or a shape other than below. Values are the caller's word.
    """

    positions: Tensor  # [R], last position that the row sees; its token's own, but in a block that sees itself
    row_segments: Tensor  # [R], ascending
    page_starts: Tensor  # [S + 1]
    page_ids: Tensor  # [number of pages of all sequences]
    paths: TreePaths | None = None
    """None: slot t holds position t throughout."""
    max_length: int | None = None
    """Exclusive bound of all positions; None if the host does not know it. A launch of few rows uses it to split their
    keys."""
    _row_starts: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        columns = {"positions": self.positions, "row_segments": self.row_segments}
        columns |= {"page_starts": self.page_starts, "page_ids": self.page_ids}
        if self.paths is not None:
            columns |= {"paths.starts": self.paths.starts, "paths.slots": self.paths.slots}
        for name, column in columns.items():
            if column.dim() != 1 or column.dtype != torch.int32 or not column.is_contiguous():
                raise ValueError(
                    f"{name} must be one-dimensional contiguous int32, got {list(column.shape)} {column.dtype} with"
                    f" strides {list(column.stride())}"
                )
        num_rows = len(self.positions)
        if len(self.row_segments) != num_rows:
            raise ValueError(f"row_segments has {len(self.row_segments)} entries, there are {num_rows} positions")
        if self.paths is not None and len(self.paths.starts) != num_rows + 1:
            raise ValueError(f"paths.starts must have {num_rows + 1} entries, got {len(self.paths.starts)}")

    def row_starts(self) -> Tensor:
        """The first row of each sequence, then R: [S + 1] int32; computed once: the rows must not change after."""
        if self._row_starts is None:
            sequences = torch.arange(len(self.page_starts), dtype=torch.int32, device=self.row_segments.device)
            self._row_starts = torch.searchsorted(self.row_segments, sequences, out_int32=True)
        return self._row_starts

    def own_slots(self) -> Tensor:
        """The slot of each row's own token within its sequence: [R] int32."""
        if self.paths is None:
            return self.positions
        starts, slots = self.paths.starts.long(), self.paths.slots
        if not len(slots):
            return self.positions
        last = slots[(starts[1:] - 1).clamp_min(0)]
        return last.where(starts.diff() > 0, self.positions)

    def slots_at(self, positions: Tensor) -> Tensor:
        """The slot of each row's path at one position a row, which is on it: [R] int32."""
        if self.paths is None or not len(self.paths.slots):
            return positions
        starts, slots = self.paths.starts, self.paths.slots
        index = starts[1:] - 1 - (self.positions - positions)
        return slots[index.clamp_min(0).long()].where(index >= starts[:-1], positions)
