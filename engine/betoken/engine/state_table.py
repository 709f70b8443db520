"""Who owns which recurrent state. Knows numbers only: no tensors, no sequences.

A model with recurrent layers keeps one committed state a sequence beside its KV pages. The state is owned through the
sequence's page list. State 0 belongs to nobody: rows without a sequence use it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from betoken.engine.errors import IntegrityError


@dataclass(slots=True)
class OwnState:
    """A sequence's state."""

    index: int
    """Number of the state in the pool, at least 1."""
    num_applied: int = 0
    """Leading tokens of the sequence that the state has seen."""


class PageList(list[int]):
    """Page ids of one sequence, and its recurrent state if the model has one."""

    __slots__ = ("state",)

    def __init__(self, page_ids: Iterable[int] = (), state: OwnState | None = None) -> None:
        super().__init__(page_ids)
        self.state = state


class StateTable:
    """States 1 to `num_states`."""

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = list(range(num_states, 0, -1))

    @property
    def num_free(self) -> int:
        """States that nobody owns."""
        return len(self._free)

    def take(self) -> OwnState:
        """A state for a new sequence; there must be a free one."""
        return OwnState(self._free.pop())

    def give_back(self, state: OwnState) -> None:
        """Make a state free; its content is void."""
        self._free.append(state.index)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Compare with the states that live page lists own.

        Raises:
            IntegrityError: a state is leaked, owned twice, or free and owned.
        """
        seen = sorted([*self._free, *owned])
        if seen != list(range(1, self.num_states + 1)):
            raise IntegrityError(f"states owned and free are {seen}, there are 1 to {self.num_states}")
