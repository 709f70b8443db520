"""Layout of a flat ragged batch over recurrent states: tokens covered by a state, and the slots of later tokens.

A sequence has one committed state, which has seen its first `applied` tokens. Inputs of later tokens wait in a ring,
each at its slot modulo the ring's size. Positions and slots as in `betoken.kernels.rows`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.kernels.rows import TreePaths


@dataclass(slots=True)
class StateRows:
    """R rows of S sequences; the rows of sequence s take the slots from first_slots[s] on, in their order.

    A forward applies the tokens [applied[s], committed[s]) to the state: those before first_slots[s] from the ring, the
    others from its own rows. Later rows leave their inputs in the ring. All tensors are int32 on one device.

    Raises:
        ValueError: a dtype or a shape other than below. Values are the caller's word.
    """

    positions: Tensor  # [R]
    row_segments: Tensor  # [R], ascending
    states: Tensor  # [S], index of each sequence's state
    applied: Tensor  # [S], tokens that the state has seen; 0 = the state is zero
    first_slots: Tensor  # [S], slot of the sequence's first row, at least applied
    committed: Tensor  # [S], tokens that the state is to have seen, from applied to the end of the rows
    paths: TreePaths | None = None
    """None: slot t holds position t throughout."""

    def __post_init__(self) -> None:
        columns = {"positions": self.positions, "row_segments": self.row_segments, "states": self.states}
        columns |= {"applied": self.applied, "first_slots": self.first_slots, "committed": self.committed}
        for name, column in columns.items():
            if column.dim() != 1 or column.dtype != torch.int32 or not column.is_contiguous():
                raise ValueError(f"{name} must be one-dimensional contiguous int32, got {list(column.shape)}")
        if len(self.row_segments) != len(self.positions):
            raise ValueError(f"row_segments has {len(self.row_segments)} entries, there are {len(self.positions)} rows")
        if len({len(column) for column in (self.states, self.applied, self.first_slots, self.committed)}) != 1:
            raise ValueError("states, applied, first_slots and committed must be of one length")

    def row_starts(self) -> Tensor:
        """The first row of each sequence, then R: [S + 1] int32."""
        sequences = torch.arange(len(self.states) + 1, dtype=torch.int32, device=self.row_segments.device)
        return torch.searchsorted(self.row_segments, sequences, out_int32=True)


class HostRows:
    """The slots of a row's path as plain numbers, for references."""

    def __init__(self, rows: StateRows) -> None:
        self.positions: list[int] = rows.positions.tolist()
        self.row_segments: list[int] = rows.row_segments.tolist()
        self.states: list[int] = rows.states.tolist()
        self.applied: list[int] = rows.applied.tolist()
        self.first_slots: list[int] = rows.first_slots.tolist()
        self.committed: list[int] = rows.committed.tolist()
        self.row_starts: list[int] = rows.row_starts().tolist()
        self._starts = rows.paths.starts.tolist() if rows.paths is not None else [0] * (len(self.positions) + 1)
        self._slots = rows.paths.slots.tolist() if rows.paths is not None else []

    def slot_at(self, row: int, position: int) -> int:
        """The slot of a position on the row's path."""
        index = self._starts[row + 1] - 1 - (self.positions[row] - position)
        return self._slots[index] if index >= self._starts[row] else position

    def row_at(self, segment: int, slot: int) -> int | None:
        """The row that fills a slot in this forward; None if an earlier forward did."""
        offset = slot - self.first_slots[segment]
        return self.row_starts[segment] + offset if offset >= 0 else None
