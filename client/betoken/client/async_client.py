"""The asyncio client: one channel, any number of tasks of one event loop.

Waits; what to ask and what an answer means is decided in `session` and `retry`. The same shape as `sync_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import WeakSet

import grpc

from betoken.client.async_generation import AsyncGeneration
from betoken.client.async_waits import num_cancels, num_cancels_so_far, pause
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
from betoken.client.config import GenerateOptions, PromptOptions, RetryPolicy
from betoken.client.model_info import ModelInfo
from betoken.client.request import ChatMessage, Prompt, detokenize_request, generate_request, tokenize_request
from betoken.client.retry import Retries
from betoken.client.session import Session
from betoken.common.errors import RequestCancelledError, UnavailableError
from betoken.common.tls import ClientTls
from betoken.v1 import generation_pb2 as pb


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
                A router on another machine is asked for at the environment's proxy (`http_proxy`, `no_proxy`), if any.
            tls: certificates; None = plain text.
            retry: what happens when a call breaks; None = `RetryPolicy()`.
            timeout_s: deadline of calls that bring none of their own, retries included; None = none.
            api_key: what the router knows this client by; None = that of the environment's `BETOKEN_API_KEY`, if any;
                empty = none.

        Raises:
            InvalidArgumentError: `address` is malformed, `tls` or `retry` is of another class, `timeout_s` is not a
                number, `api_key` is malformed, or one of certificate and key is absent. OSError: a file of `tls` cannot
                be read.
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
        self, *, wait: bool = True, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> ModelInfo:
        """The served model, its defaults and its workers; with `wait` not before a verify worker has been met.

        Raises:
            BetokenError: the router cannot be asked, or has met none in time.
            RuntimeError: the client is closed.
        """
        request = pb.GetModelInfoRequest(at_once=not wait)
        return ModelInfo.from_proto(await self._unary("GetModelInfo", request, timeout_s, headers))

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[PromptOptions],
    ) -> tuple[int, ...]:
        """The token ids of text or chat messages, as `generate` would see them.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return tuple((await self._unary("Tokenize", tokenize_request(prompt, options), timeout_s, headers)).ids)

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
            before = await num_cancels_so_far()
            while True:
                try:
                    return await getattr(self.stub(), method_name)(
                        request, timeout=retries.remaining_s(), metadata=call_metadata(span, headers)
                    )
                except grpc.RpcError as broken:
                    error = call_error(broken, is_cancelled=self.is_closed)
                except asyncio.CancelledError:
                    if num_cancels() > before:
                        raise
                    if self.is_closed:
                        raise RequestCancelledError("the client was closed") from None
                    error = UnavailableError("the call was cut off")
                await pause(self._closed, retries.delay_after(error))
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
