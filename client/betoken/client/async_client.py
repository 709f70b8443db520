"""The asyncio client: one channel, any number of tasks of one event loop.

Waits; what to ask and what an answer means is decided in `session` and `retry`. The same shape as `sync_client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from betoken.client.async_generation import AsyncGeneration
from betoken.client.async_waits import num_cancels, num_cancels_so_far, pause
from betoken.client.channel import call_error, generation_stub
from betoken.client.client_base import ClientBase, closed_error
from betoken.client.completion import Completion, Detokenized
from betoken.client.config import GenerateOptions, PromptOptions, RetryPolicy
from betoken.client.model_info import ModelInfo
from betoken.client.request import ChatMessage, Prompt
from betoken.client.session import Session
from betoken.client.unary import AnswerT, UnaryCall, detokenize_call, model_info_call, tokenize_call
from betoken.common.errors import UnavailableError


class AsyncClient(ClientBase[AsyncGeneration]):
    """An asyncio client of one router; an async context manager, usable from any number of tasks of one event loop."""

    _closed: asyncio.Event

    def _set_up(self) -> None:
        self._closed = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stub: Any = None

    def _generation(self, session: Session) -> AsyncGeneration:
        return AsyncGeneration(session, self)

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt`: `await generate(...).result()`.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the client is closed.
        """
        return await self.generate(prompt, **options).result()

    async def complete_all(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """All `n` answers to `prompt`, as `complete` gives one.

        Raises:
            BetokenError: they cannot be had, or not whole: its `partial` is what came of the first.
            RuntimeError: the client is closed.
        """
        return await self.generate(prompt, **options).results()

    async def model_info(
        self,
        *,
        wait: bool = True,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        retry: RetryPolicy | None = None,
    ) -> ModelInfo:
        """The served model, its defaults and its workers; with `wait` not before a verify worker has been met.

        `retry`: policy of this call; None = the client's.

        Raises:
            BetokenError: the router cannot be asked, or has met none in time.
            RuntimeError: the client is closed.
        """
        return await self._ask(model_info_call(wait), timeout_s, headers, retry)

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
        return await self._ask(tokenize_call(prompt, options), timeout_s, headers)

    async def detokenize(
        self, ids: Sequence[int], *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> Detokenized:
        """The text of token ids, and the bytes of each.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return await self._ask(detokenize_call(ids), timeout_s, headers)

    async def close(self) -> None:
        """Ends every call and the connection; may be called again."""
        self._closed.set()
        self._cancel_answers()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(
        self,
        call: UnaryCall[AnswerT],
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
        retry: RetryPolicy | None = None,
    ) -> AnswerT:
        with self._attempts(call.method, timeout_s, headers, retry) as attempts:
            before = await num_cancels_so_far()
            while True:
                try:
                    answer = await getattr(self.stub(), call.method)(call.request, **attempts.options())
                except grpc.RpcError as broken:
                    error = call_error(broken, is_cancelled=self.is_closed)
                except asyncio.CancelledError:
                    if num_cancels() > before:
                        raise
                    if self.is_closed:
                        raise closed_error() from None
                    error = UnavailableError("the call was cut off")
                else:
                    return call.read(answer)
                await pause(self._closed, attempts.delay_after(error))
                if self.is_closed:
                    raise closed_error()

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
