"""What the router tells OpenTelemetry of its workers: whether each is there, and the load it last said.

Read by the exporter's thread once an interval; costs a round nothing. Knows links; knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from opentelemetry.metrics import CallbackOptions, Observation

from foretoken.router.draft_pool import DraftWorker
from foretoken.router.verify_pool import VerifyWorker
from foretoken.rpc import names, telemetry

_GAUGES = {
    names.METRIC_WORKER_RUNNING: "running",
    names.METRIC_WORKER_WAITING: "waiting",
    names.METRIC_WORKER_PAGES_FREE: "free_pages",
    names.METRIC_WORKER_PAGES_LIMIT: "total_pages",
}
"""Metric to the field of `Load`, which counts what all routers have on the worker."""


class WorkerMetrics:
    """Instruments of one router's workers. Make it after telemetry is configured."""

    def __init__(self, workers: Sequence[VerifyWorker | DraftWorker]) -> None:
        self._links = [worker.link for worker in workers]
        meter = telemetry.meter()
        meter.create_observable_gauge(names.METRIC_WORKER_READY, [self._ready])
        for name, field in _GAUGES.items():
            meter.create_observable_gauge(name, [self._load(field)])
        meter.create_observable_counter(names.METRIC_WORKER_PREEMPTIONS, [self._load("preemptions")])

    def _ready(self, _: CallbackOptions) -> Iterable[Observation]:
        """1 for a worker that takes new sequences, 0 for one that is away, drains or is refused."""
        return [Observation(int(link.state == "ready"), _attributes(link.role, link.address)) for link in self._links]

    def _load(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """A callback that observes one field of every connected worker's load."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for link in self._links:
                load = link.load  # replaced by the event loop's thread, never changed
                if load is not None:
                    yield Observation(getattr(load, field), _attributes(link.role, link.address))

        return observe


def _attributes(role: str, address: str) -> dict[str, str]:
    return {names.WORKER_ROLE: role, names.WORKER_ADDRESS: address}
