"""The blocking client: one channel, any number of threads.

Waits; what to ask and what an answer means is decided in `session` and `retry`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
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
from betoken.client.config import GenerateOptions, PromptOptions, RetryPolicy
from betoken.client.model_info import ModelInfo
from betoken.client.request import ChatMessage, Prompt, detokenize_request, generate_request, tokenize_request
from betoken.client.retry import Retries
from betoken.client.session import Session
from betoken.client.sync_generation import Generation
from betoken.common.errors import RequestCancelledError
from betoken.common.tls import ClientTls
from betoken.v1 import generation_pb2 as pb


class Client:
    """A blocking client of one router; a context manager, usable from any number of threads."""

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
        self._closed = threading.Event()
        self._answers: WeakSet[Generation] = WeakSet()
        self._lock = threading.Lock()  # guards _answers
        self._channel_options = channel_options(address, tls)
        self._credentials = tls.credentials() if tls else None
        self._connect()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
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
        answer = Generation(
            Session(
                request,
                self._retries(options.get("timeout_s")),
                checked_headers(options.get("headers"), self._key_headers),
            ),
            self,
        )
        with self._lock:
            self._answers.add(answer)
        return answer

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to `prompt`: `generate(...).result()`.

        Raises:
            BetokenError: the answer cannot be had, or not whole: its `partial` is what came.
            RuntimeError: the client is closed.
        """
        return self.generate(prompt, **options).result()

    def model_info(
        self, *, wait: bool = True, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> ModelInfo:
        """The served model, its defaults and its workers; with `wait` not before a verify worker has been met.

        Raises:
            BetokenError: the router cannot be asked, or has met none in time.
            RuntimeError: the client is closed.
        """
        request = pb.GetModelInfoRequest(at_once=not wait)
        return ModelInfo.from_proto(self._unary("GetModelInfo", request, timeout_s, headers))

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
        return tuple(self._unary("Tokenize", tokenize_request(prompt, options), timeout_s, headers).ids)

    def detokenize(
        self, ids: Sequence[int], *, timeout_s: float | None = None, headers: Mapping[str, str] | None = None
    ) -> Detokenized:
        """The text of token ids, and the bytes of each.

        Raises:
            BetokenError: the router refuses, or cannot be asked.
            RuntimeError: the client is closed.
        """
        return Detokenized.from_proto(self._unary("Detokenize", detokenize_request(ids), timeout_s, headers))

    def reconnect(self) -> None:
        """Later calls take a new connection, as after an interrupt. The interrupt may have hit gRPC's code where it
        held the connection's lock, and closing such a connection would hang. So a thread ends it, with the client;
        calls of other threads stay on it until then."""
        interrupted = self._channel
        self._connect()
        threading.Thread(target=_end, args=(interrupted, self._closed), daemon=True).start()

    def current_stub(self) -> Any:
        """The router's methods. A forked process takes a connection of its own. gRPC gives up one that had a call in
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
        with self._lock:
            answers = list(self._answers)
        for answer in answers:  # one may be waiting to ask again
            answer.cancel()
        self.current_stub()  # what a process that was forked off has inherited would wait for ever, too
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unary(
        self, method_name: str, request: object, timeout_s: float | None, headers: Mapping[str, str] | None
    ) -> Any:
        retries, headers = self._retries(timeout_s), checked_headers(headers, self._key_headers)
        self._raise_if_closed()
        with call_span(method_name) as span:
            while True:
                try:
                    return getattr(self.current_stub(), method_name)(
                        request, timeout=retries.remaining_s(), metadata=call_metadata(span, headers)
                    )
                except grpc.RpcError as broken:
                    error = call_error(broken, is_cancelled=self.is_closed)
                except KeyboardInterrupt:
                    self.reconnect()
                    raise
                except ValueError:  # another thread has just closed the channel
                    if not self.is_closed:
                        raise
                    raise RequestCancelledError("the client was closed") from None
                if self._closed.wait(retries.delay_after(error)):
                    raise RequestCancelledError("the client was closed")

    def _retries(self, timeout_s: float | None) -> Retries:
        return Retries(self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def _raise_if_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed")


def _end(channel: grpc.Channel, closed: threading.Event) -> None:
    """Closes `channel` once the client is closed; until then none but this thread drops it, which closes it, too."""
    closed.wait()
    channel.close()
