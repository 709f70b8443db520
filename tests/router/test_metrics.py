"""The router's metrics: requests by gRPC status, never by an exception's name; its workers."""

import asyncio
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, Sum

from betoken.common import names
from betoken.common.errors import ResourceExhaustedError
from betoken.common.names import RPC_RESPONSE_STATUS_CODE
from betoken.router.metrics import RequestMetrics
from betoken.router.request_scope import OK, RequestScope
from betoken.router.round.events import Finished
from betoken.router.round.stats import SpeculationCounts
from betoken.router.scopes import final_status
from betoken.router.text.answer import FinishReason
from betoken.router.workers.worker_metrics import observe_workers
from betoken.rpc import telemetry
from betoken.v1.generation_pb2 import SpeculationStats
from betoken.v1.types_pb2 import Load
from tests.router.harness import MakeCluster, request


@pytest.mark.parametrize(
    ("error", "time_remaining_s", "status"),
    [
        (None, None, "OK"),
        (ResourceExhaustedError("full"), None, "RESOURCE_EXHAUSTED"),
        (asyncio.CancelledError(), None, "CANCELLED"),
        (asyncio.CancelledError(), 3.0, "CANCELLED"),
        (asyncio.CancelledError(), 0.4, "DEADLINE_EXCEEDED"),  # of ten seconds, as a client's gRPC may round them
        (asyncio.CancelledError(), 0.0, "DEADLINE_EXCEEDED"),
        (ValueError("a bug"), None, "INTERNAL"),
    ],
)
def test_a_request_is_counted_by_its_status(
    error: BaseException | None, time_remaining_s: float | None, status: str
) -> None:
    metrics = RequestMetrics(Mock())
    metrics._requests = Mock()
    try:
        with RequestScope("r", False, "m").kept(
            lambda error: final_status(error, 10.0 if time_remaining_s is not None else None, lambda: time_remaining_s),
            metrics.ended,
        ):
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    (one, attributes), _ = metrics._requests.add.call_args
    assert (one, attributes[RPC_RESPONSE_STATUS_CODE]) == (1, status)
    assert metrics._requests.add.call_count == 1


def record(counts: SpeculationCounts, **fields: Any) -> RequestScope:
    """The end of a chat of 3 prompt tokens, 20 of its 25 tokens resumed, that took 9 ms, the first token 1 ms."""
    kept = RequestScope("r", True, "", counts=counts)
    asked = Mock(model="m", prompt_ids=[1, 2, 3], resume_ids=[4] * 20, tenant="t", received_ns=5_000_000)
    kept.accepted(asked)
    counts.drafter = "ngram"
    counts.queue_ns, counts.first_token_ns = 500_000, 6_000_000
    kept.num_sent, kept.status, kept.duration_ns = 5, OK, 9_000_000
    kept.finished = Finished(FinishReason.STOP, "", 3, 25, 0, counts, 500_000, 1_000_000, 9_000_000)
    for name, value in fields.items():
        setattr(kept, name, value)
    return kept


def test_time_per_token_is_that_of_tokens_that_were_sent() -> None:
    metrics = RequestMetrics(Mock())
    metrics._per_token = Mock()
    metrics.ended(record(SpeculationCounts()))
    assert metrics._per_token.record.call_args.args[0] == 0.002


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> InMemoryMetricReader:
    """Reads all metrics of objects created after it."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    monkeypatch.setattr(telemetry, "meter", lambda: meter)
    return reader


def points(reader: InMemoryMetricReader, label: str | None = None) -> list[tuple[str, Any]]:
    """Name and data point of all metrics, or of those with the label."""
    data = reader.get_metrics_data()
    assert data is not None
    metrics = data.resource_metrics[0].scope_metrics[0].metrics
    found = [(metric.name, point) for metric in metrics for point in metric.data.data_points]
    return [(name, point) for name, point in found if label is None or label in point.attributes]


def test_an_answer_is_reported_with_what_its_counts_say(reader: InMemoryMetricReader) -> None:
    counts = SpeculationCounts(SpeculationStats(num_emitted_tokens=15, num_failovers=1), num_cached_tokens=2)
    counts.add_draft(num_draft_tokens=6, depth=4, num_accepted=3)  # a tree
    counts.add_draft(num_draft_tokens=2, depth=2, num_accepted=1)
    counts.add_round(9_000_000, 1_000_000, 2_000_000, 3_000_000)
    counts.add_ahead(9, 3)
    counts.end({"timeout": 2, "fault": 1})
    metrics = RequestMetrics(Mock(num_running=4, num_waiting=7))
    metrics.ended(record(counts))
    reported = {
        (name, *sorted(p.attributes.values(), key=str)): getattr(p, "value", None) for name, p in points(reader)
    }
    assert {key: value for key, value in reported.items() if value is not None} == {
        (names.METRIC_DRAFTS, "ngram"): 2,
        (names.METRIC_DRAFT_TOKENS, "ngram"): 8,
        (names.METRIC_ACCEPTED_TOKENS, "ngram"): 4,
        (names.METRIC_ACCEPTED_TOKENS_PER_POSITION, 0, "ngram"): 2,
        (names.METRIC_ACCEPTED_TOKENS_PER_POSITION, 1, "ngram"): 1,
        (names.METRIC_ACCEPTED_TOKENS_PER_POSITION, 2, "ngram"): 1,
        (names.METRIC_ACCEPTED_TOKENS_PER_POSITION, 3, "ngram"): 0,
        (names.METRIC_EMITTED_TOKENS,): 15,
        (names.METRIC_AHEAD_DRAFTS, True, "ngram"): 1,
        (names.METRIC_AHEAD_DRAFTS, False, "ngram"): 0,
        (names.METRIC_AHEAD_TOKENS, True, "ngram"): 3,
        (names.METRIC_AHEAD_TOKENS, False, "ngram"): 6,
        (names.METRIC_REQUESTS, "OK", "m", "stop", "t"): 1,
        (names.METRIC_INPUT_TOKENS, "m", "t"): 3,
        (names.METRIC_CACHED_INPUT_TOKENS, "m", "t"): 2,
        (names.METRIC_OUTPUT_TOKENS, "m", "t"): 5,
        (names.METRIC_FAILED_DRAFTS, "ngram", "timeout"): 2,
        (names.METRIC_FAILED_DRAFTS, "fault", "ngram"): 1,
        (names.METRIC_FAILOVERS,): 1,
        (names.METRIC_REJECTED_KEY_FILES,): 0,
        (names.METRIC_REQUESTS_RUNNING,): 4,
        (names.METRIC_REQUESTS_WAITING,): 7,
    }
    durations = {name: p for name, p in points(reader) if hasattr(p, "sum")}
    of_conventions = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "betoken", "gen_ai.request.model": "m"}
    assert all(p.attributes == of_conventions for name, p in durations.items() if name.startswith("gen_ai."))
    assert {name: p.sum for name, p in durations.items()} == {
        names.METRIC_REQUEST_DURATION: 0.009,
        names.METRIC_QUEUE_DURATION: 0.0005,
        names.METRIC_TIME_TO_FIRST_TOKEN: 0.001,
        names.METRIC_TIME_PER_OUTPUT_TOKEN: 0.002,
        names.METRIC_ROUND_OVERHEAD: 0.003,
    }


def test_a_workers_load_is_reported_under_its_names(reader: InMemoryMetricReader) -> None:
    load = Load(running=1, waiting=2, free_pages=3, total_pages=4, preemptions=5, cached_tokens=6, snapshot_bytes=7)
    load.MergeFrom(Load(memory_documents=8, memory_tokens=9, memory_hits=10, memory_evictions=11))
    worker: Any = Mock(is_ready=True, link=Mock(load=load, role="verify", address="a:1"))
    observe_workers([worker])
    assert {name: point.value for name, point in points(reader)} == {
        names.METRIC_WORKER_READY: 1,
        names.METRIC_WORKER_RUNNING: 1,
        names.METRIC_WORKER_WAITING: 2,
        names.METRIC_WORKER_PAGES_FREE: 3,
        names.METRIC_WORKER_PAGES_LIMIT: 4,
        names.METRIC_WORKER_PREEMPTIONS: 5,
        names.METRIC_WORKER_CACHED_TOKENS: 6,
        names.METRIC_WORKER_SNAPSHOT_BYTES: 7,
        names.METRIC_WORKER_MEMORY_DOCUMENTS: 8,
        names.METRIC_WORKER_MEMORY_TOKENS: 9,
        names.METRIC_WORKER_MEMORY_HITS: 10,
        names.METRIC_WORKER_MEMORY_EVICTIONS: 11,
    }


def test_a_worker_that_is_started_again_turns_no_counter_back(reader: InMemoryMetricReader) -> None:
    worker: Any = Mock(is_ready=True, link=Mock(load=None, role="verify", address="a:1"))
    observe_workers([worker])

    def reported() -> dict[str, Any]:
        counters = (names.METRIC_WORKER_PREEMPTIONS, names.METRIC_WORKER_CACHED_TOKENS)
        return {name: point.value for name, point in points(reader) if name in counters}

    for preemptions, cached_tokens, *totals in ((5, 60, 5, 60), (2, 10, 7, 70), (2, 20, 7, 80), (0, 0, 7, 80)):
        worker.link.load = Load(preemptions=preemptions, cached_tokens=cached_tokens)
        assert list(reported().values()) == totals


async def test_workers_are_reported_with_the_load_they_last_said(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster()
    await cluster.generate(max_new_tokens=3)
    await cluster.until_idle()
    await cluster.drafters[0].kill()
    (verifier,), (drafter,) = cluster.router.verify.workers, cluster.router.draft.workers
    await cluster.until(lambda: drafter.link.load is None)
    role = names.WORKER_ROLE
    seen = {(name, point.attributes[role]): point.value for name, point in points(reader, role)}
    load = verifier.link.load
    assert load is not None and load.total_pages > 0
    assert seen == {
        (names.METRIC_WORKER_READY, "verify"): 1,
        (names.METRIC_WORKER_READY, "draft"): 0,
        (names.METRIC_WORKER_RUNNING, "verify"): load.running,
        (names.METRIC_WORKER_WAITING, "verify"): load.waiting,
        (names.METRIC_WORKER_PAGES_FREE, "verify"): load.free_pages,
        (names.METRIC_WORKER_PAGES_LIMIT, "verify"): load.total_pages,
        (names.METRIC_WORKER_PREEMPTIONS, "verify"): load.preemptions,
        (names.METRIC_WORKER_CACHED_TOKENS, "verify"): load.cached_tokens,
        (names.METRIC_WORKER_SNAPSHOT_BYTES, "verify"): load.snapshot_bytes,
        (names.METRIC_WORKER_MEMORY_DOCUMENTS, "verify"): load.memory_documents,
        (names.METRIC_WORKER_MEMORY_TOKENS, "verify"): load.memory_tokens,
        (names.METRIC_WORKER_MEMORY_HITS, "verify"): load.memory_hits,
        (names.METRIC_WORKER_MEMORY_EVICTIONS, "verify"): load.memory_evictions,
    }


async def test_a_verify_worker_that_is_silent_is_not_reported_as_ready(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster(num_verifiers=2, num_drafters=0)
    silent, other = cluster.router.verify.workers
    silent.is_silent = True
    ready = [(name, point) for name, point in points(reader, names.WORKER_ROLE) if name == names.METRIC_WORKER_READY]
    reported = {point.attributes[names.WORKER_ADDRESS]: point.value for _, point in ready}
    assert reported == {silent.link.address: 0, other.link.address: 1}


def test_requests_of_several_routers_add_up(reader: InMemoryMetricReader) -> None:
    RequestMetrics(Mock(num_running=4, num_waiting=7))
    data = reader.get_metrics_data()
    assert data is not None
    reported = {metric.name: metric.data for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    for name in (names.METRIC_REQUESTS_RUNNING, names.METRIC_REQUESTS_WAITING):
        sums = reported[name]
        assert isinstance(sums, Sum) and not sums.is_monotonic, "Prometheus calls that a gauge, without _total"


async def test_a_router_that_stops_does_not_report_its_workers_as_gone(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster()
    assert [point.value for name, point in points(reader) if name == names.METRIC_WORKER_READY] == [1, 1]
    await cluster.router.close()
    assert points(reader, names.WORKER_ROLE) == []


async def test_an_answer_that_is_resumed_is_timed_by_its_new_tokens(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    records: list[RequestScope] = []
    monkeypatch.setattr(RequestMetrics, "ended", lambda _, record: records.append(record))
    cluster = await make_cluster()
    whole = await cluster.generate(max_new_tokens=30, ignore_eos=True)
    await cluster.generate(max_new_tokens=30, ignore_eos=True, resume_ids=whole.ids[:25], temperature=0)
    assert [record.num_sent for record in records] == [30, 5]


async def test_what_clients_call_a_drafter_is_no_label_unless_it_is_one(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    unmet = await make_cluster(num_drafters=0, draft=("127.0.0.1:1",), wait_ready=False)
    await unmet.generate(max_new_tokens=3, drafter="anything")
    hosted = await make_cluster()
    await hosted.generate(max_new_tokens=3, drafter="ngram")
    assert {point.attributes[names.DRAFTER] for _, point in points(reader, names.DRAFTER)} == {"", "ngram"}


async def test_what_was_done_for_a_request_counts_however_it_ends(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.005)
    call = cluster.stub.Generate(request(max_new_tokens=100, ignore_eos=True))
    num_read = 0
    while num_read < 5:
        num_read += len((await call.read()).tokens.tokens)
    call.cancel()
    await cluster.until_idle()
    reported = {name: point for name, point in points(reader)}
    assert reported[names.METRIC_EMITTED_TOKENS].value >= reported[names.METRIC_OUTPUT_TOKENS].value >= num_read
    timed = (names.METRIC_REQUEST_DURATION, names.METRIC_TIME_TO_FIRST_TOKEN, names.METRIC_TIME_PER_OUTPUT_TOKEN)
    for name in (*timed, names.METRIC_QUEUE_DURATION):
        assert (reported[name].count, reported[name].attributes[names.ERROR_TYPE]) == (1, "CANCELLED"), name


async def test_every_request_is_timed_however_it_ends(make_cluster: MakeCluster, reader: InMemoryMetricReader) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.005)
    model = cluster.verifiers[0].hello.model_id
    await cluster.generate(max_new_tokens=3, ignore_eos=True)
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate(max_new_tokens=0)
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate(deadline_s=1.0, max_new_tokens=1000, ignore_eos=True)
    await cluster.until_idle()
    durations = [point for name, point in points(reader) if name == names.METRIC_REQUEST_DURATION]
    reported = {point.attributes.get(names.ERROR_TYPE): point.count for point in durations}
    assert reported == {None: 1, "INVALID_ARGUMENT": 1, "DEADLINE_EXCEEDED": 1}
    assert {point.attributes[names.GEN_AI_REQUEST_MODEL] for point in durations} == {model}
    requests = [point.attributes for name, point in points(reader) if name == names.METRIC_REQUESTS]
    assert sorted(attributes[names.FINISH_REASON] for attributes in requests) == ["", "", "length"]


async def test_tenants_are_distinguished_up_to_a_bound(make_cluster: MakeCluster, reader: InMemoryMetricReader) -> None:
    cluster = await make_cluster(num_drafters=0, max_metric_tenants=2)
    for tenant in ("a", "b", "c", "a", "d", ""):
        await cluster.generate(max_new_tokens=2, ignore_eos=True, tenant=tenant)
    for metric, each in ((names.METRIC_REQUESTS, 1), (names.METRIC_OUTPUT_TOKENS, 2)):
        reported = {point.attributes[names.TENANT]: point.value for name, point in points(reader) if name == metric}
        assert reported == {"a": 2 * each, "b": each, "_OTHER": 2 * each, "": each}


async def test_a_failover_counts_also_where_no_worker_is_left(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.005, failover_timeout_s=0.2)
    call = cluster.stub.Generate(request(max_new_tokens=100, ignore_eos=True))
    await call.read()
    await cluster.verifiers[0].kill()
    with pytest.raises(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    await cluster.until(lambda: not cluster.router.admission.num_running)
    assert {name: point for name, point in points(reader)}[names.METRIC_FAILOVERS].value == 1


async def test_a_request_that_a_shutdown_cuts_off_was_not_cancelled(
    make_cluster: MakeCluster, reader: InMemoryMetricReader
) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.005)
    call = cluster.stub.Generate(request(max_new_tokens=1000, ignore_eos=True))
    await call.read()
    with pytest.raises(TimeoutError):
        await cluster.router.drain(0.05)
    await cluster.server.stop(None)
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
    await cluster.until_idle()
    reported = [point.attributes for name, point in points(reader) if name == names.METRIC_REQUESTS]
    assert [attributes[RPC_RESPONSE_STATUS_CODE] for attributes in reported] == ["UNAVAILABLE"]
