"""Opens the scope of every request, and records its end in metrics and log, rejected callers included.

Knows `grpc.aio` and the router's state; decides nothing about requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from betoken.common.errors import BetokenError
from betoken.common.names import OTHER, REQUEST_ID, SPAN_GENERATE
from betoken.common.trace import SpanKind, context_from, rpc_attributes, span, status_of
from betoken.router.core import Router
from betoken.router.metrics import RequestMetrics
from betoken.router.request_scope import RequestScope
from betoken.rpc.servicing import new_request_id, typed_errors

_DEADLINE_LAG_S, _DEADLINE_LAG_SHARE = 0.02, 0.04
"""How much earlier than here a deadline may pass at the client, whose call is then cancelled: the way here, and what
gRPC rounds up. It sends time-outs with two or three digits, and repeats an earlier one if that is up to 3 %
longer (`timeout_encoding.cc`, `hpack_encoder.cc`)."""
_MAX_LINES, _LINES_PERIOD_S = 20, 60.0
"""Lines that strangers may cause in the log within so many seconds."""
_METHODS = frozenset({"Generate", "Tokenize", "Detokenize"})
"""Methods named in such a line; a stranger makes up others."""


class RequestScopes:
    """The scopes of one router's requests. Make it after telemetry is configured."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._metrics = RequestMetrics(router.admission, router.settings.max_metric_tenants, router.keys)
        self._lines = LineBudget(_MAX_LINES, _LINES_PERIOD_S)

    @asynccontextmanager
    async def request(self, context: Any, *, is_chat: bool) -> AsyncIterator[RequestScope]:
        """The scope of a call of Generate, to its end; errors in it end the call by their status."""
        scope = RequestScope(new_request_id(), is_chat, self._router.served_model_id, context.time_remaining())
        kind, attributes = SpanKind.SERVER, rpc_attributes("Generate") | {REQUEST_ID: scope.request_id}
        client = context_from(_traceparent(context))

        def status(error: BaseException) -> str:
            return final_status(error, scope.timeout_s, context.time_remaining, self._router.is_cut_off)

        async with typed_errors(
            context, scope.request_id, exposes_addresses=self._router.keys.exposes_addresses(context)
        ):
            with (
                scope.kept(status, self._ended),
                span(SPAN_GENERATE, kind=kind, parent=client, attributes=attributes, status=status) as scope.span,
            ):
                yield scope

    @contextmanager
    def further(self, first: RequestScope, request_id: str) -> Iterator[RequestScope]:
        """The scope of one more answer of a request, which counts as a separate request."""
        scope = RequestScope(request_id, first.is_chat, first.model, first.timeout_s)

        def status(error: BaseException) -> str:
            return final_status(error, None, lambda: None, self._router.is_cut_off)

        with scope.kept(status, self._ended):
            yield scope

    async def refuse(self, context: Any, method: str, error: BetokenError) -> None:
        """End the call of a stranger with the status of `error`. No span: its trace would be the stranger's choice.

        Raises:
            grpc.aio.AbortError: always.
        """
        scope = RequestScope(new_request_id(), False, self._router.served_model_id)

        def record(scope: RequestScope) -> None:
            self._metrics.refused(scope)
            if self._lines.take():
                named = method if method in _METHODS else OTHER
                scope.log(method=named, peer=context.peer(), untold=self._lines.pop_untold())

        async with typed_errors(context, scope.request_id):
            with scope.kept(status_of, record):
                raise error

    def _ended(self, scope: RequestScope) -> None:
        self._metrics.ended(scope)
        scope.log()


class LineBudget:
    """Bounds how often strangers write into the log."""

    def __init__(self, most: int, period_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        """At most `most` lines in each period of `period_s`."""
        self._most = most
        self._period_s = period_s
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._num_lines = self._num_untold = 0

    def take(self) -> bool:
        """Whether one more line may be written; else it is only counted."""
        now_s = self._clock_s()
        if now_s - self._began_s >= self._period_s:
            self._began_s, self._num_lines = now_s, 0
        if self._num_lines >= self._most:
            self._num_untold += 1
            return False
        self._num_lines += 1
        return True

    def pop_untold(self) -> int:
        """Lines that were not written since this was asked last."""
        num_untold, self._num_untold = self._num_untold, 0
        return num_untold


def final_status(
    error: BaseException, timeout_s: float | None, time_remaining: Callable[[], float | None], is_cut_off: bool = False
) -> str:
    """The name of the gRPC status of a request that ended with `error`.

    Args:
        error: The handler's error. timeout_s: Seconds that the client's deadline left when the call came; None without
            a deadline. time_remaining: Seconds left now. is_cut_off: By a router that shuts down.
    """
    if isinstance(error, asyncio.CancelledError | grpc.aio.BaseError):  # the second: of a write to a call that is over
        left_s = time_remaining()
        if timeout_s is not None and left_s is not None and left_s <= _DEADLINE_LAG_S + _DEADLINE_LAG_SHARE * timeout_s:
            return "DEADLINE_EXCEEDED"
        return "UNAVAILABLE" if is_cut_off else "CANCELLED"
    return status_of(error) or "INTERNAL"


def _traceparent(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return value if isinstance(value, str) else value.decode("ascii", "replace")
    return ""
