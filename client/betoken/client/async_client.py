"""The asyncio client: one channel, any number of tasks of one event loop.

Waits; what to ask and what an answer means is decided in `session` and `retry`. The same shape as `sync_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import grpc

from betoken.client.channel import (
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_S,
    call_error,
    call_metadata,
    call_span,
    channel_options,
    check_settings,
    checked_headers,
    generation_stub,
    key_headers,
)
from betoken.client.completion import Completion, Detokenized
from betoken.client.config import GenerateOptions, RetryPolicy
from betoken.client.model_info import ModelInfo
from betoken.client.piece import Piece
from betoken.client.request import ChatMessage, Prompt, detokenize_request, generate_request, tokenize_request
from betoken.client.retry import Retries
from betoken.client.session import Session
from betoken.common.errors import BetokenError, RequestCancelledError, UnavailableError
from betoken.common.names import SPAN_CLIENT_GENERATE
from betoken.common.tls import ClientTls
from betoken.v1 import generation_pb2 as pb


class AsyncGeneration:
    """One answer, still to be streamed. Iterate over its pieces once, or await `result()`.

    The call starts with the iteration; leaving the iteration early, by `break`, an exception or cancellation of
    the task, cancels it.
    """

    def __init__(self, session: Session, client: AsyncClient) -> None:
        """Made by `AsyncClient.generate`."""
        self._session = session
        self._client = client
        self._call: Any = None
        self._cancelled = asyncio.Event()

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
    def model(self) -> str:
        """The model that answers; empty before the first message."""
        return self._session.start.model if self._session.start else ""

    @property
    def system_fingerprint(self) -> str:
        """Of all that decides the answer besides the request; to resume it with. Empty before the first message."""
        return self._session.start.system_fingerprint if self._session.start else ""

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
            num_cancels = await _num_cancels()
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
                            num_cancels = await _num_cancels(num_cancels)
                except grpc.RpcError as broken:
                    self._raise_if_cancelled()
                    error = call_error(broken, is_cancelled=False)
                except asyncio.CancelledError:
                    # grpc.aio raises it for a status CANCELLED too, whoever asked for it.
                    if _count_cancels() > num_cancels:
                        raise
                    self._raise_if_cancelled()
                    error = UnavailableError("the stream was cut off")
                finally:
                    call.cancel()
                if self._session.is_finished:
                    return
                await _wait(self._cancelled, self._session.delay_after(error))

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

    def cancel(self) -> None:
        """Ends the call; an iteration in progress in another task raises `RequestCancelledError`."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def _raise_if_cancelled(self) -> None:
        if not self._session.is_finished and (self._cancelled.is_set() or self._client.is_closed):
            reason = "the client was closed" if self._client.is_closed else "the request was cancelled"
            raise RequestCancelledError(reason, request_id=self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncClient:
    """An asyncio client of one router; an async context manager, usable from any number of tasks of one event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tls: ClientTls | None = None,
        retry: RetryPolicy | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
    ) -> None:
        """Connects when first used.

        Args:
            address: the router, `host:port`, or another target that gRPC knows (`dns:///host:port`, `unix:/path`).
                That of another machine is asked for at the environment's proxy (`http_proxy`, `no_proxy`), if any.
            tls: certificates; None = plain text.
            retry: what happens when a call breaks; None = `RetryPolicy()`.
            timeout_s: deadline of calls that bring none of their own, retries included; None = none.
            api_key: what the router knows this client by; None = that of the environment's `BETOKEN_API_KEY`, if any;
                empty = none.

        Raises:
            InvalidArgumentError: `address` is no address of a router, `tls` or `retry` is of another class, `timeout_s`
                is no number, `api_key` is none, or half a pair of certificate and key is absent.
            OSError: a file of `tls` cannot be read.
        """
        check_settings(address, tls, retry)
        self.address = address
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._key_headers = key_headers(api_key)
        self._retries(None)  # refuses what is no time now, and not at the first call
        self._channel_options = channel_options(address, tls)
        self._credentials = tls.credentials() if tls else None
        self._closed = asyncio.Event()
        self._answers: WeakSet[AsyncGeneration] = WeakSet()
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stub: Any = None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """An answer to `prompt`: text, token ids, or chat messages.

        Iterate over what is returned for pieces as they come, or take its `result()`; nothing is sent before.

        Options are the fields of `Sampling` and `Speculation` by their names, either of the two whole as `sampling` or
        `speculation`, and the rest of `GenerateOptions`.

        Raises:
            InvalidArgumentError: a value that cannot be sent; what the router refuses is raised by the iteration.
            RuntimeError: the client is closed.
        """
        self._raise_if_closed()
        request = generate_request(prompt, options)
        answer = AsyncGeneration(
            Session(
                request,
                self._retries(options.get("timeout_s")),
                checked_headers(options.get("headers"), self._key_headers),
            ),
            self,
        )
        self._answers.add(answer)
        return answer

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt`: `await generate(...).result()`.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the client is closed.
        """
        return await self.generate(prompt, **options).result()

    async def model_info(
        self, *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> ModelInfo:
        """The served model, its defaults and its workers.

        Raises:
            BetokenError: the router cannot be asked.
            RuntimeError: the client is closed.
        """
        return ModelInfo.from_proto(await self._unary("GetModelInfo", pb.GetModelInfoRequest(), timeout_s, headers))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, ...]:
        """The token ids of text or chat messages, as `generate` would see them.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return tuple((await self._unary("Tokenize", tokenize_request(prompt), timeout_s, headers)).ids)

    async def detokenize(
        self, ids: Sequence[int], *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> Detokenized:
        """The text of token ids, and the bytes of each.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return Detokenized.from_proto(await self._unary("Detokenize", detokenize_request(ids), timeout_s, headers))

    async def close(self) -> None:
        """Ends every call and the connection; may be called again."""
        self._closed.set()
        for answer in list(self._answers):  # one may be waiting to ask again
            answer.cancel()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _unary(
        self, method_name: str, request: object, timeout_s: float | None, headers: Mapping[str, str] | None
    ) -> Any:
        retries, headers = self._retries(timeout_s), checked_headers(headers, self._key_headers)
        self._raise_if_closed()
        with call_span(method_name) as span:
            num_cancels = await _num_cancels()
            while True:
                try:
                    return await getattr(self.stub(), method_name)(
                        request, timeout=retries.remaining_s(), metadata=call_metadata(span, headers)
                    )
                except grpc.RpcError as broken:
                    error = call_error(broken, is_cancelled=self.is_closed)
                except asyncio.CancelledError:
                    if _count_cancels() > num_cancels:
                        raise
                    if self.is_closed:
                        raise RequestCancelledError("the client was closed") from None
                    error = UnavailableError("the call was cut off")
                await _wait(self._closed, retries.delay_after(error))
                if self.is_closed:
                    raise RequestCancelledError("the client was closed")

    def _retries(self, timeout_s: float | None) -> Retries:
        return Retries(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def stub(self) -> Any:
        """The router's methods, over the client's connection, which belongs to the event loop that first used it.

        Raises:
            RuntimeError: another event loop runs now.
        """
        loop = asyncio.get_running_loop()
        if self._channel is None:
            self._loop = loop
            self._channel = (
                grpc.aio.secure_channel(self.address, self._credentials, self._channel_options)
                if self._credentials
                else grpc.aio.insecure_channel(self.address, self._channel_options)
            )
            self._stub = generation_stub(self._channel)
        if loop is not self._loop:
            raise RuntimeError("the client was first used in another event loop: make one in each")
        return self._stub

    def _raise_if_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed")


async def _num_cancels(last: int = 0) -> int:
    """How often this task has been cancelled and went on all the same; `last` is what it was before.

    A cancellation that was asked for and has not come yet comes here, where it is told from one of the call.
    """
    if _count_cancels() != last:
        await asyncio.sleep(0)
    return _count_cancels()


def _count_cancels() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Sleeps, but not longer than until `event`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
