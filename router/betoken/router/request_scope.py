"""One request from its call to its end: id, span, what is known of it, status, and its line in the log.

Knows requests and events; knows no gRPC and no metrics. Prompts, answers and what refusals quote never enter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from betoken.common.logs import fields
from betoken.common.trace import Span, trace_id_of, traceparent_of
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.events import Event, Finished, Tokens
from betoken.router.round.stats import SpeculationCounts
from betoken.router.spans import describe_answer, describe_request

_log = logging.getLogger(__name__)

OK = "OK"
_TOLD = (
    UnavailableError,
    InternalError,
    ResourceExhaustedError,
    DeadlineExceededError,
    UnauthenticatedError,
)
"""Errors whose text describes the service; other texts may quote the request."""


@dataclass(slots=True)
class RequestScope:
    """One request, from the call to its end."""

    request_id: str
    is_chat: bool
    model: str
    """The served one's id, until the request is known to be valid; empty = none met yet."""
    timeout_s: float | None = None
    """Time that the client's deadline left when the call came, seconds; None = no deadline."""
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    request: GenerationRequest | None = None
    """Once it is known to be valid."""
    span: Span | None = None
    num_sent: int = 0
    """Tokens sent to the client."""
    finished: Finished | None = None
    status: str = ""
    """Name of the gRPC status it ended with."""
    duration_ns: int = 0
    """From the call to the end."""
    _error: BaseException | None = None
    _began_ns: int = field(default_factory=time.perf_counter_ns)

    @property
    def traceparent(self) -> str:
        """W3C trace context of its span; empty if none is recorded."""
        return traceparent_of(self.span) if self.span is not None else ""

    @property
    def drafter(self) -> str:
        """Name of its last drafter; empty if that is not hosted."""
        return self.counts.drafter

    def accepted(self, request: GenerationRequest) -> None:
        """It is valid."""
        self.request, self.model = request, request.model
        if self.span is not None:
            describe_request(self.span, request, self.is_chat)

    def sent(self, event: Event) -> None:
        """The client was sent an event."""
        if isinstance(event, Tokens):
            self.num_sent += event.num_tokens
        elif isinstance(event, Finished):
            self.finished = event
            if self.span is not None:
                describe_answer(self.span, event)

    @contextmanager
    def kept(self, status: Callable[[BaseException], str], at_end: Callable[[RequestScope], None]) -> Iterator[None]:
        """Keep the scope to the end of the block; then call `at_end`. `status` names an error's status."""
        try:
            yield
            self.status = OK
        except BaseException as error:
            self.status, self._error = status(error), error
            raise
        finally:
            self.duration_ns = time.perf_counter_ns() - self._began_ns
            at_end(self)
            self._error = None  # whose traceback holds this

    def log(self, **details: object) -> None:
        """Write the log line, with further non-empty `details`; inside `at_end`."""
        if _log.isEnabledFor(logging.INFO):
            told = {name: value for name, value in details.items() if value}
            _log.info("request ended", extra=fields(**self._fields(), **told))

    @property
    def first_token_ns(self) -> int:
        """From the request to its first token; 0 without one."""
        first_ns = self.counts.first_token_ns
        return max(0, first_ns - self.request.received_ns) if first_ns and self.request is not None else 0

    @property
    def finish_reason(self) -> str:
        """Finish reason; empty if the answer did not finish."""
        return self.finished.reason.value if self.finished is not None and self.status == OK else ""

    def _fields(self) -> dict[str, object]:
        """The fields of the line; empty ones are left out."""
        counts, request = self.counts, self.request
        told: dict[str, object] = {
            "request_id": self.request_id,
            "status": self.status,
            "finish": self.finish_reason,
            "error": self._error_text(),
            "duration_s": _seconds(self.duration_ns),
        }
        if request is not None:
            told |= {
                "first_token_s": _seconds(self.first_token_ns),
                "queue_s": _seconds(counts.queue_ns or 0),
                "prompt_tokens": len(request.prompt_ids),
                "cached_tokens": counts.num_cached_tokens,
                "output_tokens": len(request.resume_ids) + self.num_sent,
                "resumed_tokens": len(request.resume_ids),
                "drafter": self.drafter,
                "draft_tokens": counts.stats.num_draft_tokens,
                "accepted_tokens": counts.stats.num_accepted_tokens,
                "failed_drafts": counts.stats.num_failed_drafts,
                "failovers": counts.stats.num_failovers,
                "verify_worker": ",".join(counts.verify_workers),
                "draft_worker": ",".join(counts.draft_workers),
                "model": self.model,
                "synthetic": counts.stats.is_synthetic,
                "tenant": request.tenant,
            }
        told["trace_id"] = trace_id_of(self.span) if self.span is not None else ""
        always = ("output_tokens", "prompt_tokens", "duration_s")
        return {name: value for name, value in told.items() if value or name in always}

    def _error_text(self) -> str:
        error = self._error
        if isinstance(error, InvalidArgumentError):
            return f"{error.field}: {error.limit}"
        if isinstance(error, _TOLD):
            return str(error)
        is_known = error is None or isinstance(error, BetokenError) or self.status == "CANCELLED"
        return "" if is_known else type(error).__name__


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)
