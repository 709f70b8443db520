"""Export to a real OTLP collector, in a separate process: providers can be set once per process."""

import json
import os
import socket
import subprocess
import sys

import pytest

from betoken.common.release import __version__
from betoken.router.settings import RouterSettings
from betoken.rpc.collector import endpoints, log_destinations
from betoken.rpc.telemetry import SHUTDOWN_TIMEOUT_S
from betoken.verify_worker.settings import VerifyWorkerSettings

PROGRAM = """
import json
import os
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
        got["version"] = attributes["service.version"]
        got["stage"] = attributes.get("deployment.environment.name")
        got["key"] = dict(context.invocation_metadata()).get("x-key")
        return metrics_service_pb2.ExportMetricsServiceResponse()

collector = grpc.server(futures.ThreadPoolExecutor(2))
trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), collector)
metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), collector)
port = collector.add_insecure_port("127.0.0.1:0")
collector.start()
endpoint = f"http://127.0.0.1:{port}"
if "GIVE" in os.environ:
    os.environ[os.environ["GIVE"]] = endpoint
    endpoint = ""
shutdown = telemetry.configure("router", endpoint, None, os.environ.get("INSTANCE", ""))
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
        if record.name.startswith("opentelemetry"):
            levels.append(record.levelname)

levels = []
logging.basicConfig(level="INFO", handlers=[Kept()])
with socket.socket() as unused:  # bound, never listening
    unused.bind(("127.0.0.1", 0))
    telemetry.configure("router", f"http://127.0.0.1:{unused.getsockname()[1]}", 0.05)
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
    assert (got["service"], got["version"]) == ("betoken.router", __version__)
    assert got["instance"].startswith(f"{socket.gethostname()}-"), "in containers every service is process 1"
    assert min(got["bounds"]) < 0.001, "buckets below 10 ms"


def test_environment_variables_of_opentelemetry_are_used():
    stage, key = "deployment.environment.name=production", "x-key=abc"
    environment = {"OTEL_RESOURCE_ATTRIBUTES": stage, "OTEL_EXPORTER_OTLP_HEADERS": key}
    got = json.loads(run(PROGRAM, **environment, OTEL_TRACES_SAMPLER="always_off"))
    assert (got["stage"], got["key"]) == ("production", "abc") and "span" not in got


def test_the_service_name_of_opentelemetrys_variables_is_used():
    own = {"INSTANCE": "w1"}
    got = json.loads(run(PROGRAM, **own))
    assert (got["service"], got["instance"]) == ("betoken.router", "w1")
    attributes = "service.name=by-attribute,service.instance.id=i,service.version=v"
    got = json.loads(run(PROGRAM, **own, OTEL_RESOURCE_ATTRIBUTES=attributes))
    assert (got["service"], got["instance"], got["version"]) == ("by-attribute", "i", "v")
    got = json.loads(run(PROGRAM, **own, OTEL_RESOURCE_ATTRIBUTES=attributes, OTEL_SERVICE_NAME="by-name"))
    assert (got["service"], got["instance"]) == ("by-name", "i")


@pytest.mark.parametrize(
    ("variable", "received"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", {"span", "metric"}),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", {"span"}),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", {"metric"}),
    ],
)
def test_the_endpoint_of_opentelemetrys_variables_is_used(variable, received):
    assert {"span", "metric"} & json.loads(run(PROGRAM, GIVE=variable)).keys() == received


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://user:secret@collector:4317"}


@pytest.mark.parametrize(
    ("own", "variables", "signals", "reported"),
    [
        ("", {}, set(), []),
        (
            "",
            ENDPOINT,
            {"traces", "metrics"},
            ["OpenTelemetry: traces to collector:4317 and metrics to collector:4317"],
        ),
        ("http://own:1", ENDPOINT, {"traces", "metrics"}, ["OpenTelemetry: traces to own:1 and metrics to own:1"]),
        ("", ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, {"metrics"}, ["OpenTelemetry: metrics to collector:4317"]),
        ("", ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, set(), ["OTEL_SDK_DISABLED"]),
        (
            *("", ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, set()),
            [
                "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf: traces are not sent to collector:4317",
                "metrics are not sent",
            ],
        ),
        ("http://own:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, {"traces", "metrics"}, ["traces to own:1"]),
    ],
)
def test_the_destination_of_each_exported_signal_is_logged(own, variables, signals, reported, caplog):
    caplog.set_level("INFO", "betoken")
    found = endpoints(own, variables)
    log_destinations(found)
    assert found.keys() == signals
    assert len(caplog.messages) == len(reported)
    assert all(part in message for part, message in zip(reported, caplog.messages, strict=True))
    assert "secret" not in caplog.text


def test_an_invalid_otlp_endpoint_is_rejected_by_name():
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_ENDPOINT = 'ftp://x'"):
        endpoints("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://x"})


def test_the_worker_id_of_a_service_is_its_instance_id():
    assert VerifyWorkerSettings.parse(["--model", "m", "--worker-id", "w1"]).telemetry == ("", None, "w1")
    router = ["--verify", "a:1", "--tokenizer", "t", "--metrics-interval-s", "3"]
    assert RouterSettings.parse(router).telemetry == ("", 3.0, "")
    assert RouterSettings.parse([*router, "--router-id", "r1"]).telemetry == ("", 3.0, "r1")


def test_a_web_proxy_is_not_used_for_a_collector_without_tls():
    got = json.loads(run(PROGRAM, http_proxy="http://127.0.0.1:1", no_grpc_proxy="", no_proxy=""))
    assert {"span", "metric"} <= got.keys()


def test_a_collector_that_never_answers_does_not_hold_up_a_shutdown():
    small_batches = {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "64"}  # to each of which it would not answer for two seconds
    assert float(run(SILENT_PROGRAM, **small_batches)) < SHUTDOWN_TIMEOUT_S + 20


def test_a_collector_that_is_away_does_not_fill_the_log():
    assert run(ABSENT_PROGRAM) == "['WARNING', 'ERROR']", "that it is tried again, and that it was given up: once each"
