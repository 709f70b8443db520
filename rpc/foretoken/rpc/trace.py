"""Thin spans and the trace context that travels inside messages. Needs only opentelemetry-api.

Spans are started and ended by hand and never made current across a `yield` or `await`; parents are passed explicitly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from foretoken.rpc.errors import ForetokenError
from foretoken.rpc.names import ERROR_TYPE, RPC_RESPONSE_STATUS_CODE, SCOPE

_PROPAGATOR = TraceContextTextMapPropagator()
_HEADER = "traceparent"

__all__ = ["Span", "SpanKind", "context_from", "span", "traceparent_of"]


@contextmanager
def span(
    name: str,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    parent: Span | Context | None = None,
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """A span from here to the end of the block, also in generators and when the block is cancelled.

    `parent`: a span, or a context out of `context_from`; None = whatever is current. An error is recorded by its type
    and status code; its text is not (it may quote the request).
    """
    context = trace.set_span_in_context(parent) if isinstance(parent, Span) else parent
    started = trace.get_tracer(SCOPE).start_span(name, context, kind, attributes)
    try:
        yield started
    except ForetokenError as error:
        _fail(started, error)
        started.set_attribute(RPC_RESPONSE_STATUS_CODE, error.code.name)
        raise
    except BaseException as error:
        if not isinstance(error, GeneratorExit):
            _fail(started, error)
        raise
    finally:
        started.end()


def traceparent_of(source: Span) -> str:
    """The W3C `traceparent` of a span, for a message field or metadata; empty when it is not recorded anywhere."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(source))
    return carrier.get(_HEADER, "")


def context_from(traceparent: str) -> Context:
    """The context named by a `traceparent` field; an empty or malformed one gives a context without a span."""
    return _PROPAGATOR.extract({_HEADER: traceparent} if traceparent else {}, Context())


def _fail(started: Span, error: BaseException) -> None:
    started.set_attribute(ERROR_TYPE, type(error).__name__)
    started.set_status(Status(StatusCode.ERROR))
