"""Spans and trace context: they end whatever happens, carry no text of errors, and cross processes as a field."""

import asyncio

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from foretoken.rpc import names, telemetry
from foretoken.rpc.errors import UnavailableError
from foretoken.rpc.trace import context_from, span, traceparent_of


@pytest.fixture
def exported(monkeypatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel, "_TRACER_PROVIDER", provider)
    return exporter


def test_a_child_on_the_other_side_belongs_to_the_same_trace(exported):
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


@pytest.mark.parametrize("field", ["", "garbage", "00-zz-zz-00"])
def test_a_bad_traceparent_starts_a_trace_of_its_own(exported, field):
    with span("s", parent=context_from(field)):
        pass
    assert exported.get_finished_spans()[0].parent is None


def test_an_error_is_recorded_without_its_text(exported):
    with pytest.raises(UnavailableError), span("s"):
        raise UnavailableError("the prompt was: secret")
    (finished,) = exported.get_finished_spans()
    assert finished.status.status_code is StatusCode.ERROR
    assert finished.attributes[names.ERROR_TYPE] == "UnavailableError"
    assert finished.attributes[names.RPC_RESPONSE_STATUS_CODE] == "UNAVAILABLE"
    assert "secret" not in finished.to_json()


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


def test_without_an_endpoint_nothing_is_set_up():
    telemetry.configure("router", "")()
    with span("s") as plain:
        assert not plain.is_recording()
        assert traceparent_of(plain) == ""


def test_names_are_unique():
    values = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    shared = {"foretoken"}  # the scope and the provider
    assert len([value for value in values if value not in shared]) == len(set(values) - shared)
