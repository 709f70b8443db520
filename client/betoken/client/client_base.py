"""The sans-IO part of both clients: settings, the answers under way, and how a call begins.

Opens no connection and makes no call.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar, Unpack
from weakref import WeakSet

from betoken.client.channel import (
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_S,
    call_span,
    channel_options,
    check_settings,
    checked_headers,
    key_headers,
)
from betoken.client.config import GenerateOptions, RetryPolicy
from betoken.client.generation_base import GenerationBase
from betoken.client.parallel_sampling import ParallelSession
from betoken.client.request import Prompt, generate_request
from betoken.client.retry import Retries
from betoken.client.session import Session
from betoken.client.unary import Attempts
from betoken.common.errors import RequestCancelledError
from betoken.common.tls import ClientTls

GenerationT = TypeVar("GenerationT", bound=GenerationBase)


class ClientBase(ABC, Generic[GenerationT]):
    """A client of one router."""

    _closed: threading.Event | asyncio.Event

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
            timeout_s: default deadline of calls, retries included; None = none.
            api_key: API key of the client; None = the environment's `BETOKEN_API_KEY`, if any;
                empty = none.

        Raises:
            InvalidArgumentError: `address` is not a router's address, `tls` or `retry` is of another class, `timeout_s`
                is not a number, `api_key` is malformed, or one of certificate and key is missing.
            OSError: a file of `tls` cannot be read.
        """
        check_settings(address, tls, retry)
        self.address = address
        self._retry = retry or RetryPolicy()
        self._timeout_s = timeout_s
        self._key_headers = key_headers(api_key)
        self._retries(None)  # rejects an invalid time now instead of at the first call
        self._channel_options = channel_options(address, tls)
        self._credentials = tls.credentials() if tls else None
        self._answers: WeakSet[GenerationT] = WeakSet()
        self._lock = threading.Lock()  # guards _answers
        self._set_up()

    @abstractmethod
    def _set_up(self) -> None:
        """Make what waits: `_closed`, and what a connection takes."""

    @abstractmethod
    def _generation(self, session: Session) -> GenerationT:
        """An answer of this client's kind."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> GenerationT:
        """An answer to `prompt`: text, token ids, or chat messages.

        Iterate over what is returned for pieces as they come, or take its `result()`; nothing is sent before.

        Options are the fields of `Sampling` and `Speculation` by their names, either of the two whole as `sampling` or
        `speculation`, and the rest of `GenerateOptions`.

        Raises:
            InvalidArgumentError: a value that cannot be sent; what the router refuses is raised by the iteration.
            RuntimeError: the client is closed.
        """
        self._raise_if_closed()
        request, retries = generate_request(prompt, options), self._retries(options.get("timeout_s"))
        headers = checked_headers(options.get("headers"), self._key_headers)
        session = Session if request.n <= 1 else ParallelSession
        answer = self._generation(session(request, retries, headers))
        with self._lock:
            self._answers.add(answer)
        return answer

    @contextmanager
    def _attempts(
        self, method: str, timeout_s: float | None, headers: Mapping[str, str] | None, retry: RetryPolicy | None = None
    ) -> Iterator[Attempts]:
        """The attempts of a call with one answer."""
        retries, headers = self._retries(timeout_s, retry), checked_headers(headers, self._key_headers)
        self._raise_if_closed()
        with call_span(method) as span:
            yield Attempts(retries, span, headers)

    def _cancel_answers(self) -> None:
        """End all answers: one may be waiting to ask again."""
        with self._lock:
            answers = list(self._answers)
        for answer in answers:
            answer.cancel()

    def _retries(self, timeout_s: float | None, retry: RetryPolicy | None = None) -> Retries:
        return Retries(retry or self._retry, self._timeout_s if timeout_s is None else timeout_s)

    def _raise_if_closed(self) -> None:
        if self.is_closed:
            raise RuntimeError("the client is closed")


def closed_error() -> RequestCancelledError:
    """The end of a call whose client is closed meanwhile."""
    return RequestCancelledError("the client was closed")
