"""How a request stands with its draft worker: six states, six events, one table.

Knows no worker, no time and no draft; `speculator` says what happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class DraftingState(Enum):
    """State of one request's drafting."""

    CLOSED = auto()
    """No worker has the sequence open; the next draft opens it."""
    PREFILLING = auto()
    """Open; the first draft, which takes the prompt's prefill, has not come."""
    PREFILLING_LATE = auto()
    """Open; the first draft took too long, and the round went on without it."""
    READY = auto()
    """Open; the last draft came in time."""
    LATE = auto()
    """Open; the last draft took too long, and the round went on without it."""
    REFUSED = auto()
    """A drafter refuses this request; it goes without drafts to its end."""

    @property
    def is_open(self) -> bool:
        """Whether a worker has the sequence open."""
        return self not in (DraftingState.CLOSED, DraftingState.REFUSED)

    @property
    def has_drafted(self) -> bool:
        """Whether a draft has come since the sequence was opened, so that the prompt's prefill is over."""
        return self in (DraftingState.READY, DraftingState.LATE)


class DraftingEvent(Enum):
    """Events that change the state."""

    OPENED = auto()
    """A worker was sent the sequence."""
    CAME = auto()
    """A draft came, an empty one included."""
    OVERDUE = auto()
    """The worker is at the draft, and it is waited for no longer."""
    FAILED = auto()
    """No worker could be asked, or its answer was a fault. What was open is closed."""
    REFUSED = auto()
    """The worker refuses the request itself. What was open is closed."""
    CLOSED = auto()
    """The request closed the sequence."""


_S, _E = DraftingState, DraftingEvent
_ENDS: Mapping[DraftingEvent, DraftingState] = {_E.FAILED: _S.CLOSED, _E.REFUSED: _S.REFUSED, _E.CLOSED: _S.CLOSED}

TRANSITIONS: Mapping[DraftingState, Mapping[DraftingEvent, DraftingState]] = {
    _S.CLOSED: {**_ENDS, _E.OPENED: _S.PREFILLING},
    _S.PREFILLING: {**_ENDS, _E.CAME: _S.READY, _E.OVERDUE: _S.PREFILLING_LATE},
    _S.PREFILLING_LATE: {**_ENDS, _E.CAME: _S.READY, _E.OVERDUE: _S.PREFILLING_LATE},
    _S.READY: {**_ENDS, _E.CAME: _S.READY, _E.OVERDUE: _S.LATE},
    _S.LATE: {**_ENDS, _E.CAME: _S.READY, _E.OVERDUE: _S.LATE},
    _S.REFUSED: {_E.FAILED: _S.REFUSED, _E.CLOSED: _S.REFUSED},
}
"""The state after each event that can happen in a state. Every other pair is a fault of the caller."""


def after(state: DraftingState, event: DraftingEvent) -> DraftingState:
    """The state that `event` leads to.

    Raises:
        ValueError: `event` cannot happen in this state.
    """
    following = TRANSITIONS[state].get(event)
    if following is None:
        raise ValueError(f"{event.name} cannot happen in the drafting state {state.name}")
    return following
