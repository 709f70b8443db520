"""Sets up OpenTelemetry for one process: providers and, when there is an endpoint, OTLP exporters over gRPC.

Without an endpoint the API's own no-op providers stay, and spans and counters cost next to nothing. Knows no service.
"""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from opentelemetry import metrics, trace

from betoken.common.names import SCOPE, SECONDS_BUCKETS, SECONDS_METRICS
from betoken.common.release import __version__
from betoken.rpc.collector import endpoints, exporter_options, log_destinations

_EXPORT_TIMEOUT_S = 2
_METRICS_INTERVAL_S = 10.0
_INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"  # milliseconds
SHUTDOWN_TIMEOUT_S = 4.0
"""A collector that is away must not hold up a shutdown, whatever is queued for it."""
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_COMPLAINT_PERIOD_S = 60.0
"""How often one kind of complaint of it is logged: of a collector that is away it has two for each export."""


def meter() -> metrics.Meter:
    """The meter of all Betoken metrics."""
    return metrics.get_meter(SCOPE)


def configure(
    service_name: str, otlp_endpoint: str, metrics_interval_s: float | None = None, instance_id: str = ""
) -> Callable[[], None]:
    """Export traces and metrics to `otlp_endpoint` (e.g. `http://localhost:4317`), or to where OpenTelemetry's own
    variables say; nowhere without either.

    Call once, before any span or instrument is made. Returns a function that flushes and stops the exporters; what they
    have not sent after `SHUTDOWN_TIMEOUT_S` is lost.

    Args:
        metrics_interval_s: None = OpenTelemetry's variable, or 10. instance_id: its name among its like; empty = made
            from host and process.
    """
    destinations = endpoints(otlp_endpoint, os.environ)
    if not destinations:
        return lambda: None
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    logging.getLogger(_EXPORTER_LOGGER).addFilter(_Seldom())
    resource = _resource(service_name, instance_id)
    tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # the caller shuts down
    if "traces" in destinations:
        span_exporter = OTLPSpanExporter(**exporter_options(destinations["traces"], _EXPORT_TIMEOUT_S))
        tracer_provider.add_span_processor(BatchSpanProcessor(span_exporter))
    readers = []
    if "metrics" in destinations:
        metric_exporter = OTLPMetricExporter(**exporter_options(destinations["metrics"], _EXPORT_TIMEOUT_S))
        interval_ms = _interval_ms(metrics_interval_s)
        readers.append(PeriodicExportingMetricReader(metric_exporter, export_interval_millis=interval_ms))
    views = [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(SECONDS_BUCKETS))
        for name in SECONDS_METRICS
    ]
    meter_provider = MeterProvider(readers, resource, shutdown_on_exit=False, views=views)
    if "traces" in destinations:
        trace.set_tracer_provider(tracer_provider)
    if readers:
        metrics.set_meter_provider(meter_provider)
    log_destinations(destinations)

    def shutdown() -> None:
        tracer_provider.shutdown()
        meter_provider.shutdown(timeout_millis=_EXPORT_TIMEOUT_S * 1000)

    def bounded_shutdown() -> None:
        # The SDK sends queued spans batch after batch, each with its own timeout, without a limit for all.
        stopping = threading.Thread(target=shutdown, name="telemetry-shutdown", daemon=True)
        stopping.start()
        stopping.join(SHUTDOWN_TIMEOUT_S)

    return bounded_shutdown


def _resource(service_name: str, instance_id: str) -> Any:
    """Resource attributes: OpenTelemetry's variables override the service's own values."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own_process = f"{socket.gethostname()}-{os.getpid()}"  # in containers every service is process 1
    own = {
        "service.name": f"{SCOPE}.{service_name}",
        "service.version": __version__,
        "service.instance.id": instance_id or own_process,
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _interval_ms(metrics_interval_s: float | None) -> float | None:
    """None leaves it to the variable."""
    if metrics_interval_s is None and os.environ.get(_INTERVAL_VARIABLE, "").strip():
        return None
    return (_METRICS_INTERVAL_S if metrics_interval_s is None else metrics_interval_s) * 1000


class _Seldom(logging.Filter):
    """Lets the records of one message, whatever its arguments, pass once a period."""

    def __init__(self) -> None:
        super().__init__()
        self._due_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s < self._due_s.get(record.msg, -math.inf):
            return False
        self._due_s[record.msg] = now_s + _COMPLAINT_PERIOD_S
        return True
