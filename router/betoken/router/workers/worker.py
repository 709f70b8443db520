"""One worker and the sequences this router has on it: what verify and draft workers share.

Knows the link and sessions by number, not verification results or drafts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from betoken.common.errors import BetokenError, UnavailableError, from_link_error
from betoken.router.workers.mailbox import Patience
from betoken.rpc.link import LinkOptions, LinkState, WorkerLink
from betoken.rpc.link.faults import LinkFaults
from betoken.v1.types_pb2 import CloseSequence, LinkError, SourceInfo, WorkerHello

_MAX_SEQUENCE_ID = (1 << 64) - 1


class SequenceIds:
    """Sequence ids: never reused, and unlikely to equal ids of an earlier router process."""

    def __init__(self) -> None:
        self._last = secrets.randbits(63)

    def next(self) -> int:
        """Return a fresh id, at least 1."""
        self._last = self._last % _MAX_SEQUENCE_ID + 1
        return self._last


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The shared part of all workers of a router."""

    link: LinkOptions
    sequence_ids: SequenceIds
    patience: Patience


class WorkerSession(Protocol):
    """The router's end of an open sequence."""

    @property
    def sequence_id(self) -> int:
        """Number on the link."""
        ...

    def deliver(self, answer: Any, /) -> None:
        """An answer came from the link."""
        ...

    def pending(self) -> None:
        """The worker is at work; the answer will come."""
        ...

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        ...


SessionT = TypeVar("SessionT", bound=WorkerSession)


class Worker(Generic[SessionT]):
    """A link with its sessions. Subclasses define the content of frames and the error of a lost session."""

    def __init__(self, link: WorkerLink[Any, Any], options: WorkerOptions) -> None:
        self.link = link
        self._options = options
        self._faults = LinkFaults(f"{link.role} worker {link.address}")
        self._sessions: dict[int, SessionT] = {}

    @property
    def id(self) -> str:
        """The name from its handshake; its address if that is empty."""
        return self.hello.worker_id or self.link.address

    @property
    def is_draining(self) -> bool:
        """Whether it asked to be left."""
        return self.link.state is LinkState.DRAINING

    @property
    def hello(self) -> WorkerHello:
        """Its handshake; only of a worker that has been ready."""
        assert self.link.hello is not None
        return self.link.hello

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sequences."""
        return self.link.state is LinkState.READY

    @property
    def drafters(self) -> Sequence[str]:
        """Names of its hosted drafters, the default first, or attached ones; the last reported ones if disconnected."""
        return tuple(self.link.hello.drafters) if self.link.hello is not None else ()

    @property
    def sources(self) -> Sequence[SourceInfo]:
        """The sources of its draft tokens; while disconnected, the last reported ones."""
        return self.link.hello.sources if self.link.hello is not None else ()

    @property
    def load_factor(self) -> float:
        """How full it is: own sequences, or what it last said of all routers' together, over what it holds at once."""
        load = self.link.load
        others = load.running + load.waiting if load is not None else 0
        return max(len(self._sessions), others) / max(1, self.hello.max_sequences)

    @property
    def own_load_factor(self) -> float:
        """How full it is of own sequences alone: never late, unlike what it says itself."""
        return len(self._sessions) / max(1, self.hello.max_sequences)

    def close_session(self, session: SessionT) -> None:
        """Free a session's sequence on the worker; idempotent."""
        if self._sessions.pop(session.sequence_id, None) is not None:
            with suppress(UnavailableError):  # the link has just ended, and all its sequences with it
                self.link.send(closes=[CloseSequence(sequence_id=session.sequence_id)])

    def _deliver(self, answers: Iterable[Any]) -> None:
        for answer in answers:
            session = self._sessions.get(answer.sequence_id)
            if session is not None:  # answers may arrive after the close
                session.deliver(answer)

    def _note_pending(self, sequence_ids: Sequence[int]) -> None:
        for sequence_id in sequence_ids:
            session = self._sessions.get(sequence_id)
            if session is not None:
                session.pending()

    def _take_errors(self, entries: Iterable[LinkError], for_session: Callable[[BetokenError], Exception]) -> None:
        """End the sequences that the worker has closed. `for_session` makes of a fault what the session raises."""
        for entry in entries:
            error = from_link_error(entry)
            if entry.sequence_id == 0:
                self._faults.take(error)
                continue
            session = self._sessions.pop(entry.sequence_id, None)
            if session is not None:
                session.fail(for_session(error))  # first, since the link may lack room for more
                self.link.send(closes=[CloseSequence(sequence_id=entry.sequence_id)])

    def _lose_sessions(self, error: Exception) -> None:
        """The link has ended, and all its sequences with it."""
        self._faults.log_count()
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.fail(error)
