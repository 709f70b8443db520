"""Thin spans and the trace context that travels inside messages. Needs only opentelemetry-api.

Spans are started and ended by hand and never made current across a `yield` or `await`; parents are passed explicitly.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from betoken.common.errors import BetokenError
from betoken.common.names import (
    ERROR_TYPE,
    RPC_METHOD,
    RPC_RESPONSE_STATUS_CODE,
    RPC_SYSTEM_GRPC,
    RPC_SYSTEM_NAME,
    SCOPE,
)

_PROPAGATOR = TraceContextTextMapPropagator()
_HEADER = "traceparent"
_MAX_CHARS = 256  # several times what one has; of much longer ones OpenTelemetry complains in the log, at each request

_FAULTS_OF_SERVERS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Statuses that make a server's span one of an error; any but OK makes a client's so. Source: semantic conventions."""

__all__ = [
    "Span",
    "SpanKind",
    "context_from",
    "fail",
    "rpc_attributes",
    "span",
    "status_of",
    "trace_id_of",
    "traceparent_of",
]


def status_of(error: BaseException) -> str:
    """The name of the gRPC status of an error; empty if it has none."""
    return error.code.name if isinstance(error, BetokenError) else ""


def rpc_attributes(method: str) -> dict[str, AttributeValue]:
    """Attributes of every span of a public call, at either end."""
    return {RPC_SYSTEM_NAME: RPC_SYSTEM_GRPC, RPC_METHOD: f"betoken.v1.GenerationService/{method}"}


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Span | Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
    status: Callable[[BaseException], str] = status_of,
) -> Iterator[Span]:
    """A span from here to the end of the block, also in generators and when the block is cancelled.

    `parent`: a span, or a context out of `context_from`; None = whatever is current. An error is recorded by its status
    as a call (`status`), or by its type. Its text stays out, since it may quote the request. A client's
    mistake or cancellation does not count as a server's error.
    """
    context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
    started = trace.get_tracer(SCOPE).start_span(name, context, kind, attributes)
    try:
        yield started
        if kind is not SpanKind.INTERNAL:
            started.set_attribute(RPC_RESPONSE_STATUS_CODE, "OK")
    except GeneratorExit:
        raise
    except BaseException as error:
        if name_of_status := status(error):
            started.set_attribute(RPC_RESPONSE_STATUS_CODE, name_of_status)
        if kind is not SpanKind.SERVER or not name_of_status or name_of_status in _FAULTS_OF_SERVERS:
            fail(started, name_of_status or type(error).__name__)
        raise
    finally:
        started.end()


def traceparent_of(source: Span) -> str:
    """The W3C `traceparent` of a span, for a message field or metadata; empty when it is not recorded anywhere."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(source))
    return carrier.get(_HEADER, "")


def trace_id_of(source: Span) -> str:
    """32 hex digits of the trace that a span belongs to, also where only the caller records it; empty without one."""
    context = source.get_span_context()
    return format(context.trace_id, "032x") if context.is_valid else ""


def context_from(traceparent: str) -> Context:
    """The context named by a `traceparent` field; an empty or malformed one gives a context without a span."""
    is_one = 0 < len(traceparent) <= _MAX_CHARS
    return _PROPAGATOR.extract({_HEADER: traceparent} if is_one else {}, Context())


def fail(failed: Span, kind: str) -> None:
    """Make a span one of an error of this kind: a status's name, or a type's."""
    failed.set_attribute(ERROR_TYPE, kind)
    failed.set_status(Status(StatusCode.ERROR))
