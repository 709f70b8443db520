"""One answer of the asyncio client: its pieces, over as many streams as it takes. The same shape as `sync_generation`.

Waits; what to ask and what an answer means is decided in `session` and `retry`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from betoken.client.async_waits import num_cancels, num_cancels_so_far, pause
from betoken.client.channel import call_error, call_metadata, call_span
from betoken.client.completion import Completion
from betoken.client.generation_base import GenerationBase
from betoken.client.piece import Piece
from betoken.client.session import Session
from betoken.common.errors import BetokenError, UnavailableError
from betoken.common.names import SPAN_CLIENT_GENERATE


class _Client(Protocol):
    """The parts of a client that an answer uses."""

    @property
    def is_closed(self) -> bool: ...

    def stub(self) -> Any: ...


class AsyncGeneration(GenerationBase):
    """One answer, still to be streamed. Iterate over its pieces once, or await `result()`.

    The call starts with the iteration; leaving the iteration early, by `break`, an exception or cancellation of
    the task, cancels it.
    """

    _cancelled: asyncio.Event

    def __init__(self, session: Session, client: _Client) -> None:
        """Made by `AsyncClient.generate`."""
        super().__init__(session, client)
        self._cancelled = asyncio.Event()
        self._client = client

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Pieces as they arrive, over as many streams as it takes.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: iterated before, or the client was used in another event loop.
        """
        self._session.begin()
        return self._pieces()

    async def _pieces(self) -> AsyncGenerator[Piece, None]:
        with self._session.iteration(), call_span("Generate", SPAN_CLIENT_GENERATE) as span:
            before = await num_cancels_so_far()
            while True:
                self._raise_if_cancelled()
                request, timeout_s = self._session.next_request()
                error: BetokenError | None = None
                stub = self._client.stub()
                call = self._call = stub.Generate(
                    request, timeout=timeout_s, metadata=call_metadata(span, self._session.headers)
                )
                try:
                    async for response in call:
                        piece = self._session.feed(response)
                        if piece is not None:
                            yield piece
                            before = await num_cancels_so_far(before)
                except grpc.RpcError as broken:
                    self._raise_if_cancelled()
                    error = call_error(broken, is_cancelled=False)
                except asyncio.CancelledError:
                    # grpc.aio raises it for a status CANCELLED too, whoever asked for it.
                    if num_cancels() > before:
                        raise
                    self._raise_if_cancelled()
                    error = UnavailableError("the stream was cut off")
                finally:
                    call.cancel()
                if self._session.is_finished:
                    return
                await pause(self._cancelled, self._session.delay_after(error))

    async def result(self) -> Completion:
        """The whole answer; streams it first unless it has been iterated to its end.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the iteration was begun and left before its end.
        """
        if self._session.must_iterate():
            async for _ in self:
                pass
        return self._session.completion()

    async def results(self) -> list[Completion]:
        """All answers of a request for several (`n`), as `result` gives the first."""
        await self.result()
        return [part.completion() for part in self._session.parts]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
