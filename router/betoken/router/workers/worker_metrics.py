"""The router's OpenTelemetry signals of its workers: whether each is ready and works, and the load it last reported.

Read by the exporter's thread once an interval; costs a round nothing. Knows workers; knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from opentelemetry.metrics import CallbackOptions, Observation

from betoken.common import names
from betoken.router.workers.draft_worker import DraftWorker
from betoken.router.workers.verify_worker import VerifyWorker
from betoken.rpc import telemetry
from betoken.rpc.link import LinkState

_GAUGES = {
    names.METRIC_WORKER_RUNNING: "running",
    names.METRIC_WORKER_WAITING: "waiting",
    names.METRIC_WORKER_PAGES_FREE: "free_pages",
    names.METRIC_WORKER_PAGES_LIMIT: "total_pages",
    names.METRIC_WORKER_SNAPSHOT_BYTES: "snapshot_bytes",
    names.METRIC_WORKER_MEMORY_DOCUMENTS: "memory_documents",
    names.METRIC_WORKER_MEMORY_TOKENS: "memory_tokens",
}
"""Metric to the field of `Load`, which counts what all routers have on the worker."""
_COUNTERS = {
    names.METRIC_WORKER_PREEMPTIONS: "preemptions",
    names.METRIC_WORKER_CACHED_TOKENS: "cached_tokens",
    names.METRIC_WORKER_MEMORY_HITS: "memory_hits",
    names.METRIC_WORKER_MEMORY_EVICTIONS: "memory_evictions",
}
"""Counters of the worker since its start."""

_Worker = VerifyWorker | DraftWorker


def observe_workers(workers: Sequence[_Worker]) -> None:
    """Make the instruments of one router's workers, after telemetry is configured."""

    def ready(_: CallbackOptions) -> Iterable[Observation]:
        # A router that stops has closed its links. It has no label for workers, and its last value stays a while.
        kept = (worker for worker in workers if worker.link.state is not LinkState.CLOSED)
        return [Observation(int(_works(worker)), _attributes(worker)) for worker in kept]

    def load(field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """A callback that observes one field of every connected worker's load."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for worker in workers:
                last = worker.link.load  # replaced by the event loop's thread, never changed
                if last is not None:
                    yield Observation(getattr(last, field), _attributes(worker))

        return observe

    def total(field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """A callback that observes one count, which continues when a restarted worker begins at 0."""
        counts = {worker: _Count() for worker in workers}

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for worker, count in counts.items():
                last = worker.link.load
                if last is not None:
                    yield Observation(count.total(getattr(last, field)), _attributes(worker))

        return observe

    meter = telemetry.meter()
    meter.create_observable_gauge(names.METRIC_WORKER_READY, [ready])
    for name, field in _GAUGES.items():
        meter.create_observable_gauge(name, [load(field)])
    for name, field in _COUNTERS.items():
        meter.create_observable_counter(name, [total(field)])


@dataclass(slots=True)
class _Count:
    """A worker's count over all its starts: a counter that went back would be exported as a negative increase."""

    before: int = 0
    """Count of the starts before this one."""
    last: int = 0

    def total(self, value: int) -> int:
        if value < self.last:
            self.before += self.last
        self.last = value
        return self.before + value


def _works(worker: _Worker) -> bool:
    return worker.is_ready and not (isinstance(worker, VerifyWorker) and worker.is_silent)


def _attributes(worker: _Worker) -> dict[str, str | bool]:
    attributes: dict[str, str | bool] = {
        names.WORKER_ROLE: worker.link.role,
        names.WORKER_ADDRESS: worker.link.address,
    }
    hello = worker.link.hello
    return attributes | {names.SYNTHETIC: True} if hello is not None and hello.is_synthetic else attributes
