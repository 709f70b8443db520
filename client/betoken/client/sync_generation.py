"""One answer of the blocking client: its pieces, over as many streams as it takes.

Waits; what to ask and what an answer means is decided in `session` and `retry`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from betoken.client.channel import call_error, call_metadata, call_span
from betoken.client.completion import Completion
from betoken.client.generation_base import Closable, GenerationBase
from betoken.client.piece import Piece
from betoken.client.session import Session
from betoken.common.names import SPAN_CLIENT_GENERATE
from betoken.v1 import generation_pb2 as pb


class _Client(Closable, Protocol):
    """The parts of a client that an answer uses."""

    def current_stub(self) -> Any: ...

    def reconnect(self) -> None: ...


@contextmanager
def interrupts(reconnect: Callable[[], None]) -> Iterator[None]:
    """Calls `reconnect` after an interrupt within the block, and raises the interrupt.

    An interrupt that hits `threading.Condition.wait`, of gRPC or of an event, while it has let go of its lock comes out
    as the RuntimeError of the `with` statement that then releases that lock.

    Raises:
        KeyboardInterrupt: as raised in the block, or in place of such a RuntimeError.
    """
    try:
        yield
    except KeyboardInterrupt:
        reconnect()
        raise
    except RuntimeError as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        reconnect()
        raise KeyboardInterrupt from error


class Generation(GenerationBase):
    """One answer, still to be streamed. Iterate over its pieces once, or ask for `result`.

    The call starts with the iteration; leaving the iteration early, by `break` or an exception, cancels it.
    """

    _cancelled: threading.Event

    def __init__(self, session: Session, client: _Client) -> None:
        """Made by `Client.generate`."""
        super().__init__(session, client)
        self._cancelled = threading.Event()
        self._client = client

    def __iter__(self) -> Generator[Piece, None, None]:
        """Pieces as they arrive, over as many streams as it takes.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: iterated before.
        """
        self._session.begin()
        return self._pieces()

    def _pieces(self) -> Generator[Piece, None, None]:
        with (
            interrupts(self._client.reconnect),
            self._session.iteration(),
            call_span("Generate", SPAN_CLIENT_GENERATE) as span,
        ):
            while True:
                self._raise_if_cancelled()
                request, timeout_s = self._session.next_request()
                error = None
                call = None
                try:
                    call = self._call = self._begin(request, timeout_s, call_metadata(span, self._session.headers))
                    if self._cancelled.is_set():  # by another thread, which may not have seen this call
                        call.cancel()
                    for response in call:
                        piece = self._session.feed(response)
                        if piece is not None:
                            yield piece
                except grpc.RpcError as broken:
                    self._raise_if_cancelled()
                    error = call_error(broken, is_cancelled=False)
                finally:
                    if call is not None:
                        call.cancel()
                if self._session.is_finished:
                    return
                self._cancelled.wait(self._session.delay_after(error))

    def result(self) -> Completion:
        """The whole answer; streams it first unless it has been iterated to its end.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the iteration was begun and left before its end.
        """
        if self._session.must_iterate():
            for _ in self:
                pass
        return self._session.completion()

    def results(self) -> list[Completion]:
        """All answers of a request for several (`n`), as `result` gives the first."""
        self.result()
        return [part.completion() for part in self._session.parts]

    def _begin(self, request: pb.GenerateRequest, timeout_s: float | None, metadata: Any) -> Any:
        try:
            return self._client.current_stub().Generate(request, timeout=timeout_s, metadata=metadata)
        except ValueError:  # another thread has just closed the channel
            self._raise_if_cancelled()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
