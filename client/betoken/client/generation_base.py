"""One answer apart from waiting: what is known of it before its end, and who cancelled it.

Makes no call; what to ask and what an answer means is decided in `session` and `retry`.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any, Protocol

from betoken.client.completion import Completion
from betoken.client.piece import Logprobs
from betoken.client.session import Session
from betoken.common.errors import RequestCancelledError


class Closable(Protocol):
    """A client, as its answers need it."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        ...


class GenerationBase:
    """One answer, still to be streamed."""

    _cancelled: threading.Event | asyncio.Event

    def __init__(self, session: Session, client: Closable) -> None:
        """Made by a client's `generate`."""
        self._session = session
        self._owner = client
        self._call: Any = None
        """The call under way, or the last one."""

    @property
    def request_id(self) -> str:
        """The router's id of the request, for its logs; empty before the first message."""
        return self._session.start.request_id if self._session.start else ""

    @property
    def seed(self) -> int | None:
        """The seed in force; None before the first message."""
        return self._session.start.seed if self._session.start else None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt as the model sees it; empty before the first message."""
        return tuple(self._session.start.prompt_ids) if self._session.start else ()

    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]:
        """As `Completion.prompt_logprobs`; all of them are there before the first piece."""
        return self._session.prompt_logprobs

    @property
    def model(self) -> str:
        """The model that answers; empty before the first message."""
        return self._session.start.model if self._session.start else ""

    @property
    def system_fingerprint(self) -> str:
        """Hash of all that decides the answer besides the request; resume with it. Empty before the first message."""
        return self._session.start.system_fingerprint if self._session.start else ""

    def seed_of(self, answer: int) -> int | None:
        """The seed of one of several answers (`n`); None before its first message."""
        start = self._session.parts[answer].start
        return start.seed if start is not None else None

    def completed(self, answer: int) -> Completion | None:
        """One of several answers, once it is whole."""
        part = self._session.parts[answer]
        return part.completion() if part.is_finished else None

    def so_far(self) -> Completion | None:
        """Return the received part of the answer with the reason `LENGTH`, without the router's counts and times; None
        before the first message."""
        return self._session.so_far()

    def cancel(self) -> None:
        """Ends the call; an iteration in progress, in another thread or task, raises `RequestCancelledError`."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def _raise_if_cancelled(self) -> None:
        if not self._session.is_finished and (self._cancelled.is_set() or self._owner.is_closed):
            reason = "the client was closed" if self._owner.is_closed else "the request was cancelled"
            raise RequestCancelledError(reason, request_id=self.request_id)
