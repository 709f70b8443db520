"""Export to a real OTLP collector, in a process of its own: providers can be set once per process."""

import json
import os
import socket
import subprocess
import sys

from betoken.rpc.telemetry import SHUTDOWN_TIMEOUT_S

PROGRAM = """
import json
from concurrent import futures
import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from betoken.common import names
from betoken.rpc import telemetry
from betoken.common.trace import span

got = {}

class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        got["span"] = request.resource_spans[0].scope_spans[0].spans[0].name
        return trace_service_pb2.ExportTraceServiceResponse()

class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(self, request, context):
        resource = request.resource_metrics[0]
        metric = resource.scope_metrics[0].metrics[0]
        got["metric"] = metric.name
        got["bounds"] = list(metric.histogram.data_points[0].explicit_bounds)
        attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
        got["service"], got["instance"] = attributes["service.name"], attributes["service.instance.id"]
        got["stage"] = attributes.get("deployment.environment.name")
        got["key"] = dict(context.invocation_metadata()).get("x-key")
        return metrics_service_pb2.ExportMetricsServiceResponse()

collector = grpc.server(futures.ThreadPoolExecutor(2))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), collector)
metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), collector)
port = collector.add_insecure_port("127.0.0.1:0")
collector.start()
shutdown = telemetry.configure("router", f"http://127.0.0.1:{port}")
telemetry.meter().create_histogram(names.METRIC_ROUND_OVERHEAD, unit="s").record(0.003)
with span(names.SPAN_SEQUENCE):
    pass
shutdown()
print(json.dumps(got))
"""

SILENT_PROGRAM = """
import socket, time
from betoken.rpc import telemetry
from betoken.common.trace import span

collector = socket.create_server(("127.0.0.1", 0))  # takes connections and never says a word
shutdown = telemetry.configure("router", f"http://127.0.0.1:{collector.getsockname()[1]}")
for _ in range(2048):
    with span("s"):
        pass
before = time.monotonic()
shutdown()
print(time.monotonic() - before)
"""

ABSENT_PROGRAM = """
import logging, os, socket, time
from betoken.rpc import telemetry

class Kept(logging.Handler):
    def emit(self, record):
        levels.append(record.levelname)

levels = []
logging.basicConfig(level="INFO", handlers=[Kept()])
with socket.socket() as nobody:  # bound, never listening
    nobody.bind(("127.0.0.1", 0))
    telemetry.configure("router", f"http://127.0.0.1:{nobody.getsockname()[1]}", 0.05)
    telemetry.meter().create_counter("c").add(1)
    give_up_at = time.monotonic() + 50
    while len(levels) < 2 and time.monotonic() < give_up_at:
        time.sleep(0.05)
    time.sleep(2)  # for more of them
    print(levels, flush=True)
    os._exit(0)
"""


def run(program: str, **environment: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


def test_spans_and_metrics_reach_the_collector():
    got = json.loads(run(PROGRAM))
    assert (got["span"], got["metric"]) == ("betoken.worker.sequence", "betoken.round.overhead")
    assert got["service"] == "betoken.router"
    assert got["instance"].startswith(f"{socket.gethostname()}-"), "in containers every service is process 1"
    assert min(got["bounds"]) < 0.001, "buckets below 10 ms"


def test_variables_of_opentelemetry_are_heeded():
    stage, key = "deployment.environment.name=production", "x-key=abc"
    environment = {"OTEL_RESOURCE_ATTRIBUTES": stage, "OTEL_EXPORTER_OTLP_HEADERS": key}
    got = json.loads(run(PROGRAM, **environment, OTEL_TRACES_SAMPLER="always_off"))
    assert (got["stage"], got["key"]) == ("production", "abc") and "span" not in got


def test_a_proxy_for_the_web_is_not_asked_for_a_collector_without_tls():
    got = json.loads(run(PROGRAM, http_proxy="http://127.0.0.1:1", no_grpc_proxy="", no_proxy=""))
    assert {"span", "metric"} <= got.keys()


def test_a_collector_that_never_answers_does_not_hold_up_a_shutdown():
    small_batches = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64"}  # to each of which it would not answer for two seconds
    assert float(run(SILENT_PROGRAM, **small_batches)) < SHUTDOWN_TIMEOUT_S + 20


def test_a_collector_that_is_away_does_not_fill_the_log():
    assert run(ABSENT_PROGRAM) == "['WARNING', 'ERROR']", "that it is tried again, and that it was given up: once each"
