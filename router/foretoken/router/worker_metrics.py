"""What the router tells OpenTelemetry of its workers: whether each is ready and works, and the load it last said.

Read by the exporter's thread once an interval; costs a round nothing. Knows workers; knows no requests.
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

_Worker = VerifyWorker | DraftWorker


def observe_workers(workers: Sequence[_Worker]) -> None:
    """Make the instruments of one router's workers, after telemetry is configured."""

    def ready(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(int(_works(worker)), _attributes(worker)) for worker in workers]

    def load(field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """A callback that observes one field of every connected worker's load."""

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for worker in workers:
                last = worker.link.load  # replaced by the event loop's thread, never changed
                if last is not None:
                    yield Observation(getattr(last, field), _attributes(worker))

        return observe

    meter = telemetry.meter()
    meter.create_observable_gauge(names.METRIC_WORKER_READY, [ready])
    for name, field in _GAUGES.items():
        meter.create_observable_gauge(name, [load(field)])
    meter.create_observable_counter(names.METRIC_WORKER_PREEMPTIONS, [load("preemptions")])
    meter.create_observable_counter(names.METRIC_WORKER_CACHED_TOKENS, [load("cached_tokens")])


def _works(worker: _Worker) -> bool:
    return worker.is_ready and not (isinstance(worker, VerifyWorker) and worker.is_silent)


def _attributes(worker: _Worker) -> dict[str, str]:
    return {names.WORKER_ROLE: worker.link.role, names.WORKER_ADDRESS: worker.link.address}
