"""Who owns which recurrent state. Knows numbers only: no tensors, no sequences.

A model with recurrent layers keeps one committed state per sequence next to its KV pages. It is owned through the
sequence's page list. State 0 is a scratch state, used by rows without a sequence.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from betoken.engine.errors import IntegrityError
from betoken.engine.snapshots import Snapshots


@dataclass(slots=True)
class OwnState:
    """A sequence's state."""

    index: int
    """Number of the state in the pool, at least 1."""
    num_applied: int = 0
    """Leading tokens of the sequence that the state has seen."""


class Borders:
    """Lengths at which a sequence's state is kept for others: some of its text, and the last whole page after that."""

    def __init__(self, wanted: Iterable[int], length: int) -> None:
        """`wanted`: lengths within the text known at first, whole pages. `length`: of that text."""
        self.wanted = sorted(wanted)
        self._length = length
        self.latest: tuple[int, int] | None = None
        """Page and snapshot of the last one after `length`: the next takes its place."""

    def last(self, seen: int, length: int, page_size: int) -> int | None:
        """The last border in (seen, length]; None without one."""
        whole = length // page_size * page_size
        if whole > self._length:
            return whole if whole > seen else None
        return max((border for border in self.wanted if seen < border <= length), default=None)

    def inside(self, start: int, end: int) -> list[int]:
        """Borders of the first text in (start, end), ascending."""
        return [border for border in self.wanted if start < border < end]

    def is_rolling(self, border: int) -> bool:
        """Whether it is after the first text."""
        return border > self._length


class PageList(list[int]):
    """Page ids of one sequence, and its recurrent state if the model has one."""

    __slots__ = ("borders", "state")

    def __init__(self, page_ids: Iterable[int] = (), state: OwnState | None = None) -> None:
        super().__init__(page_ids)
        self.state = state
        self.borders: Borders | None = None
        """Where its state is kept for others; None: nowhere."""


class StateTable:
    """States 1 to `num_states`, and the snapshots of some."""

    def __init__(self, num_states: int, num_snapshots: int = 0, num_waiting: int = 0) -> None:
        """`num_waiting`: most tokens of a sequence that a state need not have seen."""
        self.num_states = num_states
        self.num_waiting = num_waiting
        self.snapshots = Snapshots(num_snapshots)
        self._free = list(range(num_states, 0, -1))

    @property
    def num_free(self) -> int:
        """States without an owner."""
        return len(self._free)

    def take(self) -> OwnState:
        """A state for a new sequence; there must be a free one."""
        return OwnState(self._free.pop())

    def take_from(self, page_id: int, length: int) -> OwnState:
        """A state that has seen the text of `length` tokens up to this page's end, which has a snapshot."""
        state = self.take()
        state.num_applied = length
        self.snapshots.restore(page_id, state.index, length)
        return state

    def give_back(self, state: OwnState) -> None:
        """Make a state free; its content is void."""
        self._free.append(state.index)

    def stop_before(self, page_ids: Sequence[int], start: int, end: int) -> int:
        """Slot at which a forward over the committed slots from `start` on stops for a snapshot; `end`: none.

        The last border needs no stop if the following inputs can wait next to the state.
        """
        borders = page_ids.borders if isinstance(page_ids, PageList) else None
        inside = borders.inside(start, end) if borders is not None else []
        if not inside or (len(inside) == 1 and end - inside[0] <= self.num_waiting):
            return end
        return inside[0]

    def save(self, page_ids: PageList, page_size: int) -> None:
        """Keep the state as a snapshot if it is at a border, whose page is published."""
        state, borders = page_ids.state, page_ids.borders
        if state is None or borders is None or not self.snapshots.num_snapshots:
            return
        length = state.num_applied
        if borders.last(length - 1, length, page_size) != length:
            return
        page_id = page_ids[length // page_size - 1]
        if borders.is_rolling(length) and page_id not in self.snapshots:
            if borders.latest is not None:
                self.snapshots.drop(*borders.latest)
            snapshot = self.snapshots.save(page_id, state.index, length)
            borders.latest = None if snapshot is None else (page_id, snapshot)
        else:
            self.snapshots.save(page_id, state.index, length)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Compare with the states that live page lists own.

        Raises:
            IntegrityError: a state is leaked, owned twice, or free and owned.
        """
        seen = sorted([*self._free, *owned])
        if seen != list(range(1, self.num_states + 1)):
            raise IntegrityError(f"states owned and free are {seen}, there are 1 to {self.num_states}")
