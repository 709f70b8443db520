"""Sets up OpenTelemetry for one process: providers and, when an endpoint is given, OTLP exporters over gRPC.

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

_EXPORT_TIMEOUT_S = 2
SHUTDOWN_TIMEOUT_S = 4.0
"""A collector that is away must not hold up a shutdown, whatever is queued for it."""
_EXPORTER_LOGGER = "opentelemetry.exporter.otlp.proto.grpc.exporter"
_COMPLAINT_PERIOD_S = 60.0
"""How often one kind of complaint of it is logged: of a collector that is away it has two for each export."""


def meter() -> metrics.Meter:
    """The meter of all Betoken metrics."""
    return metrics.get_meter(SCOPE)


def configure(service_name: str, otlp_endpoint: str, metrics_interval_s: float = 10.0) -> Callable[[], None]:
    """Export traces and metrics to `otlp_endpoint` (e.g. `http://localhost:4317`; empty = nowhere).

    Call once, before any span or instrument is made. Returns a function that flushes and stops the exporters; what they
    have not sent after `SHUTDOWN_TIMEOUT_S` is lost.
    """
    if not otlp_endpoint:
        return lambda: None
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    logging.getLogger(_EXPORTER_LOGGER).addFilter(_Seldom())
    instance = f"{socket.gethostname()}-{os.getpid()}"  # in containers every service is process 1
    resource = Resource.create({"service.name": f"{SCOPE}.{service_name}", "service.instance.id": instance})
    is_plain = not otlp_endpoint.startswith("https://")
    # As for links: containers inherit a proxy for the web, which knows no collector.
    options: Any = (("grpc.enable_http_proxy", 0),) if is_plain else None
    tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # the caller shuts down
    tracer_provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(otlp_endpoint, insecure=is_plain, timeout=_EXPORT_TIMEOUT_S, channel_options=options)
        )
    )
    reader = PeriodicExportingMetricReader(
        OTLPMetricExporter(otlp_endpoint, insecure=is_plain, timeout=_EXPORT_TIMEOUT_S, channel_options=options),
        export_interval_millis=metrics_interval_s * 1000,
    )
    views = [
        View(instrument_name=name, aggregation=ExplicitBucketHistogramAggregation(SECONDS_BUCKETS))
        for name in SECONDS_METRICS
    ]
    meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False, views=views)
    trace.set_tracer_provider(tracer_provider)
    metrics.set_meter_provider(meter_provider)

    def shutdown() -> None:
        tracer_provider.shutdown()
        meter_provider.shutdown(timeout_millis=_EXPORT_TIMEOUT_S * 1000)

    def bounded_shutdown() -> None:
        # The SDK sends queued spans batch after batch, each with a timeout of its own, and takes no limit for them all.
        stopping = threading.Thread(target=shutdown, name="telemetry-shutdown", daemon=True)
        stopping.start()
        stopping.join(SHUTDOWN_TIMEOUT_S)

    return bounded_shutdown


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
