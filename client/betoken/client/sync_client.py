"""The blocking client: one channel, any number of threads.

Waits; what to ask and what an answer means is decided in `session` and `retry`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from betoken.client.channel import call_error, generation_stub
from betoken.client.client_base import ClientBase, closed_error
from betoken.client.completion import Completion, Detokenized
from betoken.client.config import GenerateOptions, PromptOptions, RetryPolicy
from betoken.client.model_info import ModelInfo
from betoken.client.request import ChatMessage, Prompt
from betoken.client.session import Session
from betoken.client.sync_generation import Generation, interrupts
from betoken.client.unary import AnswerT, UnaryCall, detokenize_call, model_info_call, tokenize_call


class Client(ClientBase[Generation]):
    """A blocking client of one router; a context manager, usable from any number of threads.

    A process that forks with an open stream sets `GRPC_ENABLE_FORK_SUPPORT=1` before gRPC is imported: gRPC's threads
    then pause during the fork.
    """

    _closed: threading.Event

    def _set_up(self) -> None:
        self._closed = threading.Event()
        self._connect()

    def _generation(self, session: Session) -> Generation:
        return Generation(session, self)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt`: `generate(...).result()`.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the client is closed.
        """
        return self.generate(prompt, **options).result()

    def complete_all(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """All `n` answers to `prompt`, as `complete` gives one.

        Raises:
            BetokenError: they cannot be had, or not whole: its `partial` is what came of the first.
            RuntimeError: the client is closed.
        """
        return self.generate(prompt, **options).results()

    def model_info(
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
        return self._ask(model_info_call(wait), timeout_s, headers, retry)

    def tokenize(
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
        return self._ask(tokenize_call(prompt, options), timeout_s, headers)

    def detokenize(
        self, ids: Sequence[int], *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> Detokenized:
        """The text of token ids, and the bytes of each.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return self._ask(detokenize_call(ids), timeout_s, headers)

    def reconnect(self) -> None:
        """Later calls take a new connection, as after an interrupt. The interrupt may have hit gRPC's code where it
        held the connection's lock, and closing such a connection would hang. So a thread ends it, with the client;
        calls of other threads stay on it until then."""
        interrupted = self._channel
        self._connect()
        threading.Thread(target=_end, args=(interrupted, self._closed), daemon=True).start()

    def current_stub(self) -> Any:
        """The router's methods. A forked process opens its own connection. gRPC drops a connection that had a call in
        progress at the fork, and its calls would wait for ever."""
        if self._process_id != os.getpid():
            self.reconnect()
        return self.stub

    def _connect(self) -> None:
        self._process_id = os.getpid()
        self._channel = (
            grpc.secure_channel(self.address, self._credentials, self._channel_options)
            if self._credentials
            else grpc.insecure_channel(self.address, self._channel_options)
        )
        self.stub = generation_stub(self._channel)

    def close(self) -> None:
        """Ends every call and the connection; may be called again. A signal handler, which may have interrupted a call
        of this client, rather cancels the answers."""
        self._closed.set()
        self._cancel_answers()
        self.current_stub()  # what a process that was forked off has inherited would wait for ever, too
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self,
        call: UnaryCall[AnswerT],
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
        retry: RetryPolicy | None = None,
    ) -> AnswerT:
        with interrupts(self.reconnect), self._attempts(call.method, timeout_s, headers, retry) as attempts:
            while True:
                try:
                    answer = getattr(self.current_stub(), call.method)(call.request, **attempts.options())
                except grpc.RpcError as broken:
                    error = call_error(broken, is_cancelled=self.is_closed)
                except ValueError:  # another thread has just closed the channel
                    if not self.is_closed:
                        raise
                    raise closed_error() from None
                else:
                    return call.read(answer)
                if self._closed.wait(attempts.delay_after(error)):
                    raise closed_error()


def _end(channel: grpc.Channel, closed: threading.Event) -> None:
    """Closes `channel` once the client is closed; until then none but this thread drops it, which closes it, too."""
    closed.wait()
    channel.close()
