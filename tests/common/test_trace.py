"""Spans and trace context: they end whatever happens, carry no text of errors, and cross processes as a field."""

import asyncio
import re

import pytest
from opentelemetry.trace import StatusCode

from betoken.common import names
from betoken.common.errors import InvalidArgumentError, UnavailableError
from betoken.common.trace import SpanKind, context_from, span, traceparent_of
from betoken.rpc import telemetry


def test_a_child_span_of_another_process_belongs_to_the_same_trace(exported):
    with span(names.SPAN_GENERATE, attributes={names.TENANT: "t"}) as parent:
        field = traceparent_of(parent)
        with span(names.SPAN_SEQUENCE, parent=context_from(field)):
            pass
        with span(names.SPAN_SEQUENCE, parent=parent):
            pass
    verify, draft, generate = exported.get_finished_spans()
    assert field.startswith("00-")
    assert verify.parent.span_id == draft.parent.span_id == generate.context.span_id
    assert generate.attributes[names.TENANT] == "t"


@pytest.mark.parametrize("field", ["", "garbage", "00-zz-zz-00", "x" * 3000])
def test_an_invalid_traceparent_starts_a_new_trace_without_a_log_line(exported, caplog, field):
    with span("s", parent=context_from(field)):
        pass
    assert exported.get_finished_spans()[0].parent is None
    assert not caplog.records, "clients could fill the log"


def test_a_span_records_an_error_without_its_text(exported):
    with pytest.raises(UnavailableError, match="secret"), span("s"):
        raise UnavailableError("the prompt was: secret")
    (finished,) = exported.get_finished_spans()
    assert finished.status.status_code is StatusCode.ERROR
    assert finished.attributes[names.ERROR_TYPE] == "UNAVAILABLE"
    assert finished.attributes[names.RPC_RESPONSE_STATUS_CODE] == "UNAVAILABLE"
    assert "secret" not in finished.to_json()


@pytest.mark.parametrize(
    ("kind", "error", "is_fault"),
    [
        (SpanKind.SERVER, InvalidArgumentError("top_k", -1, "must be 0 or more"), False),
        (SpanKind.CLIENT, InvalidArgumentError("top_k", -1, "must be 0 or more"), True),
        (SpanKind.SERVER, UnavailableError("no worker"), True),
        (SpanKind.SERVER, ValueError("a bug"), True),
    ],
)
def test_a_client_error_is_not_an_error_of_the_server_span(exported, kind, error, is_fault):
    with pytest.raises(type(error), match=re.escape(str(error))), span("s", kind=kind):
        raise error
    (finished,) = exported.get_finished_spans()
    assert (finished.status.status_code is StatusCode.ERROR, names.ERROR_TYPE in finished.attributes) == (is_fault,) * 2


@pytest.mark.parametrize(
    ("kind", "reported"), [(SpanKind.SERVER, "OK"), (SpanKind.CLIENT, "OK"), (SpanKind.INTERNAL, None)]
)
def test_the_span_of_a_successful_call_has_the_status_ok(exported, kind, reported):
    with span("s", kind=kind):
        pass
    (finished,) = exported.get_finished_spans()
    assert finished.attributes.get(names.RPC_RESPONSE_STATUS_CODE) == reported


async def test_a_cancelled_stream_ends_its_span(exported):
    async def stream():
        with span("s"):
            yield 1
            await asyncio.sleep(3600)

    async def consume():
        async for _ in stream():
            pass

    task = asyncio.ensure_future(consume())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (finished,) = exported.get_finished_spans()
    assert finished.attributes[names.ERROR_TYPE] == "CancelledError"


def test_without_an_endpoint_no_telemetry_is_set_up():
    telemetry.configure("router", "")()
    with span("s") as plain:
        assert not plain.is_recording()
        assert traceparent_of(plain) == ""


def test_attribute_and_metric_names_are_unique():
    values = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    shared = {"betoken"}  # the scope and the provider
    assert len([value for value in values if value not in shared]) == len(set(values) - shared)
