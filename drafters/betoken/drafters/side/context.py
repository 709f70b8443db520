"""The part of one sequence that a draft layer has taken in: KV of true states by slot, and states that are still to be
taken in.

The state of position p and the token of position p + 1 make one row. If all states of a text are known, slot p holds
that row. States are missing if the target reused cached pages: the row of a later position then
follows the last known one, as if the missing ones did not exist; rotations encode distances and are off by the hole.
Knows ids, slots and tensors; not the layer, and no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from betoken.engine.page_table import PageTable


@dataclass(slots=True, eq=False)
class LayerContext:
    """One sequence's context. `ids` are its committed ids, which the owner appends to."""

    ids: Sequence[int]
    table: PageTable
    order: int = 0
    """Among all that share the pages."""
    idle_since_ns: int = 0
    """When its last draft was finished (`time.perf_counter_ns`)."""
    num_ahead: int = 0
    """Tokens after a row's own that its KV depends on. The last rows are then taken in again, with the tokens that were
    committed in the meantime."""
    page_ids: list[int] = field(default_factory=list)
    num_known: int = 0
    """Slots [0, num_known) hold KV of true states."""
    num_pending: int = 0
    """Rows that follow them and are to be taken in."""
    last: Tensor | None = None
    """States [n, H] of the last rows that were taken in: the rows that are taken in again, at least one."""
    _start: int = 0
    """Position of the state in the slot num_known - 1, less that slot."""
    _pending: list[Tensor] = field(default_factory=list)
    _num_published: int = 0
    """Slots of pages that others may take over."""
    _is_whole: bool = True
    """Whether slot p holds position p throughout."""

    @property
    def is_current(self) -> bool:
        """Whether the states of all positions except the last id's, which no forward has read yet, are known."""
        has_rows = self.num_pending > 0 or self.last is not None
        return has_rows and self._next_position == len(self.ids) - 1

    @property
    def num_rows(self) -> int:
        """Slots that hold true states once all is taken in."""
        return self.num_known + self.num_pending

    def add_states(self, first_position: int, hidden: Tensor) -> None:
        """Fused states [n, H] of positions from `first_position` on; known ones are skipped."""
        if self.num_rows == 0:
            self._find_pages()
        skipped = max(0, self._next_position - first_position)
        if skipped >= len(hidden):
            return
        if first_position > self._next_position:
            self._pending, self.num_pending = [], 0
            self.num_known -= self._num_again
            self.last = None
            self._start = first_position - self.num_known
            self._is_whole = False
        self._pending.append(hidden[skipped:])
        self.num_pending += len(hidden) - skipped

    def rows(self) -> tuple[int, list[int], Tensor]:
        """The part to be taken in: its first slot, token ids and states [n, H]. Without news the last row again."""
        parts = list(self._pending)
        num_again = self._num_again if parts else max(1, self._num_again)
        if num_again:
            assert self.last is not None
            parts.insert(0, self.last[-num_again:])
        hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        first = self.num_known - num_again
        start = self._start + first + 1
        return first, list(self.ids[start : start + len(hidden)]), hidden

    def taken_in(self) -> None:
        """The KV of all that `rows` gave is written."""
        if self.num_pending:
            known = self._pending if self.last is None else [self.last, *self._pending]
            num_kept = max(1, self.num_ahead)
            self.last = known[-1][-num_kept:] if len(known[-1]) >= num_kept else torch.cat(known)[-num_kept:]
            self.num_known += self.num_pending
            self._pending, self.num_pending = [], 0
        num_full = max(0, self.num_known - self.num_ahead) // self.table.page_size * self.table.page_size
        if self._is_whole and num_full > self._num_published:
            self.table.publish(self.page_ids, self._keys(num_full), num_full)
            self._num_published = num_full

    def forget(self) -> None:
        """Free the pages; the next states start a new context."""
        if self.page_ids:
            self.table.release(self.page_ids)
        self.page_ids, self._pending, self.last = [], [], None
        self.num_known = self.num_pending = self._start = self._num_published = 0
        self._is_whole = True

    @property
    def _next_position(self) -> int:
        return self._start + self.num_rows

    def _find_pages(self) -> None:
        """Begin with what the layer has computed of an equal text."""
        size = self.table.page_size
        self.page_ids = self.table.find(self._keys(max(0, len(self.ids) - 2 - self.num_ahead) // size * size))
        self.num_known = len(self.page_ids) * size

    @property
    def _num_again(self) -> int:
        """Rows that were taken in and whose KV depends on tokens that were not committed then."""
        return 0 if self.last is None else min(self.num_ahead, len(self.last))

    def _keys(self, num_slots: int) -> list[int]:
        """Inputs of the KV of each of the first slots, beyond the preceding ones: the last token that it depends on,
        and in the first slot the tokens before that one, too."""
        if num_slots < 1:
            return []
        first, num_first = 0, self.num_ahead + 2
        for token_id in self.ids[:num_first]:
            first = first << 32 | token_id
        return [first, *self.ids[num_first : num_slots + num_first - 1]]
