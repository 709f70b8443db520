"""Prometheus metrics: requests of this gateway, speculation of its finished answers, current workers.

Names are OpenTelemetry's as Prometheus writes them; vLLM's four for speculation are added.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from betoken.client import Completion, ModelInfo, SpeculationStats
from betoken.common import names

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE = "0"
"""vLLM's label of one engine among several; a router is one."""


def _written(name: str) -> str:
    return name.replace(".", "_")


class _Family:
    """Makes metrics of one registry with a model label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_written(name), text, ["model", *labels], registry=self._registry)

    def seconds(self, name: str, text: str, label: str = "model") -> Histogram:
        buckets = names.SECONDS_BUCKETS
        return Histogram(f"{_written(name)}_seconds", text, [label], buckets=buckets, registry=self._registry)

    def theirs(self, what: str, text: str, *labels: str) -> Counter:
        """One of vLLM's."""
        labels = ("model_name", "engine", *labels)
        return Counter(f"vllm:spec_decode_num_{what}", text, labels, registry=self._registry)


class _Speculation:
    """Counters of speculation."""

    def __init__(self, family: _Family) -> None:
        self._forwards = family.counter("betoken.verify_forwards", "Forwards of the target, prefill excluded.")
        self._emitted = family.counter(names.METRIC_EMITTED_TOKENS, "Tokens emitted by those forwards.")
        self._failed = family.counter(names.METRIC_FAILED_DRAFTS, "Draft blocks that were late, stale or failed.")
        self._failovers = family.counter(names.METRIC_FAILOVERS, "Re-openings on another verify worker.")
        self._ours = (
            family.counter(names.METRIC_DRAFTS, "Draft blocks verified."),
            family.counter(names.METRIC_DRAFT_TOKENS, "Draft tokens verified."),
            family.counter(names.METRIC_ACCEPTED_TOKENS, "Draft tokens accepted."),
        )
        self._theirs = (
            family.theirs("drafts", "Number of spec decoding drafts."),
            family.theirs("draft_tokens", "Number of spec decoding draft tokens."),
            family.theirs("accepted_tokens", "Number of spec decoding accepted tokens."),
        )
        text = "Draft tokens accepted, by position."
        self._our_positions = family.counter(names.METRIC_ACCEPTED_TOKENS_PER_POSITION, text, "position")
        self._their_positions = family.theirs("accepted_tokens_per_pos", text, "position")

    def add(self, model: str, stats: SpeculationStats) -> None:
        self._forwards.labels(model).inc(stats.num_verify_forwards)
        self._emitted.labels(model).inc(stats.num_emitted_tokens)
        self._failed.labels(model).inc(stats.num_failed_drafts)
        self._failovers.labels(model).inc(stats.num_failovers)
        counts = (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens)
        for ours, theirs, count in zip(self._ours, self._theirs, counts, strict=True):
            ours.labels(model).inc(count)
            theirs.labels(model, _ENGINE).inc(count)
        for position, count in enumerate(stats.num_accepted_per_position):
            self._our_positions.labels(model, position).inc(count)
            self._their_positions.labels(model, _ENGINE, position).inc(count)


class Metrics:
    """Counters of one process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        family = _Family(registry)
        labels = ["method", "path", "status"]
        self._requests = Counter("betoken_http_requests", "Requests.", labels, registry=registry)
        self.running = Gauge("betoken_http_requests_running", "Requests being answered.", registry=registry)
        text = "Time from a request to the end of its reply."
        self._took = family.seconds("betoken.http_request_duration", text, "path")
        self._answers = family.counter("betoken.answers", "Answers that ended.", "finish_reason")
        self._prompt = family.counter("betoken.prompt_tokens", "Prompt tokens.")
        self._cached = family.counter("betoken.cached_prompt_tokens", "Prompt tokens whose KV was reused.")
        self._output = family.counter("betoken.output_tokens", "Output tokens by source.", "provenance")
        self._duration = family.seconds(names.METRIC_REQUEST_DURATION, "Duration of answers, as the router measured.")
        self._first = family.seconds(names.METRIC_TIME_TO_FIRST_TOKEN, "Time to the first token.")
        self._per_token = family.seconds(names.METRIC_TIME_PER_OUTPUT_TOKEN, "Time per token after the first.")
        self._speculation = _Speculation(family)

    def request_ended(self, method: str, path: str, status: int, took_s: float) -> None:
        """A reply was sent, or its client left (status 499)."""
        self._requests.labels(method, path, status).inc()
        self._took.labels(path).observe(took_s)

    def answered(self, answer: Completion) -> None:
        """An answer ended."""
        model, usage = answer.model, answer.usage
        self._answers.labels(model, str(answer.finish_reason)).inc()
        self._prompt.labels(model).inc(usage.prompt_tokens)
        self._cached.labels(model).inc(usage.cached_prompt_tokens)
        for provenance, count in Counts(token.provenance for token in answer.tokens).items():
            self._output.labels(model, provenance).inc(count)
        self._duration.labels(model).observe(answer.duration_s)
        self._first.labels(model).observe(answer.time_to_first_token_s)
        if len(answer.tokens) > 1:
            after_s = max(0.0, answer.duration_s - answer.time_to_first_token_s)
            self._per_token.labels(model).observe(after_s / (len(answer.tokens) - 1))
        self._speculation.add(model, answer.speculation)

    def page(self, info: ModelInfo | None) -> bytes:
        """All metrics as text; without workers if the router does not respond."""
        workers = CollectorRegistry()
        if info is not None:
            workers.register(_Workers(info))
        return generate_latest(self._registry) + generate_latest(workers)


class _Workers:
    """Workers from one description of the model."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info

    def collect(self) -> Iterator[Metric]:
        workers = (*self._info.verify_workers, *self._info.draft_workers)
        known = [worker for worker in workers if worker.state == "ready"]
        yield _gauge(
            names.METRIC_WORKER_READY,
            "Whether a worker is ready.",
            [(worker.role, worker.address, float(worker.state == "ready")) for worker in workers],
        )
        for name, text, field in (
            (names.METRIC_WORKER_RUNNING, "Open sequences.", "running"),
            (names.METRIC_WORKER_WAITING, "Sequences that wait for pages.", "waiting"),
            (names.METRIC_WORKER_PAGES_FREE, "Free KV pages.", "free_pages"),
            (names.METRIC_WORKER_PAGES_LIMIT, "All KV pages.", "total_pages"),
            (names.METRIC_WORKER_SNAPSHOT_BYTES, "Bytes of snapshots of recurrent states.", "snapshot_bytes"),
            (names.METRIC_WORKER_PREEMPTIONS, "Sequences that lost their pages, since its start.", "preemptions"),
            (names.METRIC_WORKER_CACHED_TOKENS, "Tokens whose KV was reused, since its start.", "cached_tokens"),
            (names.METRIC_WORKER_MEMORY_DOCUMENTS, "Earlier texts that drafters keep.", "memory_documents"),
            (names.METRIC_WORKER_MEMORY_TOKENS, "Tokens of these texts.", "memory_tokens"),
            (names.METRIC_WORKER_MEMORY_HITS, "Drafts from earlier texts, since its start.", "memory_hits"),
            (names.METRIC_WORKER_MEMORY_EVICTIONS, "Texts evicted, since its start.", "memory_evictions"),
        ):
            yield _gauge(name, text, [(worker.role, worker.address, getattr(worker, field)) for worker in known])


def _gauge(name: str, text: str, values: Iterable[tuple[str, str, float]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_written(name), text, labels=["role", "address"])
    for role, address, value in values:
        family.add_metric([role, address], value)
    return family
