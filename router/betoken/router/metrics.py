"""The router's OpenTelemetry signals: one span and a handful of counters per request, nothing per round or token.

Without an exporter all of it is a no-op. Prompts and text never enter.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from betoken.common import names
from betoken.router.access.keys import Keys
from betoken.router.policy.admission import Admission
from betoken.router.request_scope import OK, RequestScope
from betoken.router.spans import kind_attributes
from betoken.rpc import telemetry
from betoken.v1.generation_pb2 import SpeculationStats


class RequestMetrics:
    """Instruments of one router. Make it after telemetry is configured."""

    def __init__(self, admission: Admission, max_tenants: int = 100, keys: Keys | None = None) -> None:
        """`max_tenants`: number of distinct tenants; later ones are counted together."""
        self._max_tenants = max_tenants
        self._tenants = {""}
        meter = telemetry.meter()
        self._requests = meter.create_counter(names.METRIC_REQUESTS)
        self._duration = meter.create_histogram(names.METRIC_REQUEST_DURATION, "s")
        self._queue = meter.create_histogram(names.METRIC_QUEUE_DURATION, "s")
        self._first_token = meter.create_histogram(names.METRIC_TIME_TO_FIRST_TOKEN, "s")
        self._per_token = meter.create_histogram(names.METRIC_TIME_PER_OUTPUT_TOKEN, "s")
        self._overhead = meter.create_histogram(names.METRIC_ROUND_OVERHEAD, "s")
        self._drafts = meter.create_counter(names.METRIC_DRAFTS)
        self._draft_tokens = meter.create_counter(names.METRIC_DRAFT_TOKENS)
        self._accepted = meter.create_counter(names.METRIC_ACCEPTED_TOKENS)
        self._accepted_per_position = meter.create_counter(names.METRIC_ACCEPTED_TOKENS_PER_POSITION)
        self._input = meter.create_counter(names.METRIC_INPUT_TOKENS)
        self._cached_input = meter.create_counter(names.METRIC_CACHED_INPUT_TOKENS)
        self._output = meter.create_counter(names.METRIC_OUTPUT_TOKENS)
        self._emitted = meter.create_counter(names.METRIC_EMITTED_TOKENS)
        self._failed_drafts = meter.create_counter(names.METRIC_FAILED_DRAFTS)
        self._ahead_drafts = meter.create_counter(names.METRIC_AHEAD_DRAFTS)
        self._ahead_tokens = meter.create_counter(names.METRIC_AHEAD_TOKENS)
        self._failovers = meter.create_counter(names.METRIC_FAILOVERS)

        def running(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(admission.num_running),)

        def waiting(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(admission.num_waiting),)

        def rejected(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(keys.num_rejected_files if keys is not None else 0),)

        # Up-down counters, since routers' numbers add up and a backend goes by the type.
        meter.create_observable_up_down_counter(names.METRIC_REQUESTS_RUNNING, [running])
        meter.create_observable_up_down_counter(names.METRIC_REQUESTS_WAITING, [waiting])
        meter.create_observable_counter(names.METRIC_REJECTED_KEY_FILES, [rejected])

    def ended(self, scope: RequestScope) -> None:
        """Count a request by the status it ended with, record how long it took, and what was done for it.

        Durations of what did not end well have its status as `error.type`.
        """
        counts = scope.counts
        whose = self._count(scope)
        attributes = kind_attributes(scope.model, scope.is_chat)
        if scope.status != OK:
            attributes[names.ERROR_TYPE] = scope.status
        self._duration.record(scope.duration_ns / 1e9, attributes)
        if counts.queue_ns is not None and scope.request is not None:
            self._queue.record(counts.queue_ns / 1e9, attributes)
            self._input.add(len(scope.request.prompt_ids), whose)
            self._cached_input.add(counts.num_cached_tokens, whose)
            self._output.add(scope.num_sent, whose)
        if scope.first_token_ns:
            self._first_token.record(scope.first_token_ns / 1e9, attributes)
        if scope.first_token_ns and scope.num_sent > 1:
            decode_ns = scope.duration_ns - scope.first_token_ns
            self._per_token.record(decode_ns / 1e9 / (scope.num_sent - 1), attributes)
        if scope.request is not None:
            self._speculated(counts.stats, scope.drafter)

    def refused(self, scope: RequestScope) -> None:
        """Count a call that was refused before its message was read."""
        self._count(scope)

    def _count(self, scope: RequestScope) -> dict[str, str]:
        """Count a request by its status; return the attributes of its further counts."""
        whose = {names.GEN_AI_REQUEST_MODEL: scope.model, names.TENANT: self._tenant(scope)}
        how = {names.RPC_RESPONSE_STATUS_CODE: scope.status, names.FINISH_REASON: scope.finish_reason}
        self._requests.add(1, whose | how)
        return whose

    def _tenant(self, scope: RequestScope) -> str:
        tenant = scope.request.tenant if scope.request is not None else ""
        if len(self._tenants) <= self._max_tenants:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else names.OTHER

    def _speculated(self, stats: SpeculationStats, drafter: str) -> None:
        attributes: dict[str, str | bool] = {names.DRAFTER: drafter}
        if stats.is_synthetic:
            attributes[names.SYNTHETIC] = True
        if stats.router_overhead_p50_ns:
            self._overhead.record(stats.router_overhead_p50_ns / 1e9)
        self._drafts.add(stats.num_drafts, attributes)
        self._draft_tokens.add(stats.num_draft_tokens, attributes)
        self._accepted.add(stats.num_accepted_tokens, attributes)
        for position, num_accepted in enumerate(stats.num_accepted_per_position):
            self._accepted_per_position.add(num_accepted, attributes | {names.DRAFT_POSITION: position})
        self._emitted.add(stats.num_emitted_tokens)
        for reason, num_failed in stats.num_failed_drafts_by_reason.items():
            self._failed_drafts.add(num_failed, attributes | {names.ERROR_TYPE: reason})
        if stats.num_ahead_hits or stats.num_ahead_misses:
            num_unused = stats.num_ahead_tokens - stats.num_used_ahead_tokens
            self._ahead_drafts.add(stats.num_ahead_hits, attributes | {names.AHEAD_HIT: True})
            self._ahead_drafts.add(stats.num_ahead_misses, attributes | {names.AHEAD_HIT: False})
            self._ahead_tokens.add(stats.num_used_ahead_tokens, attributes | {names.AHEAD_USED: True})
            self._ahead_tokens.add(num_unused, attributes | {names.AHEAD_USED: False})
        self._failovers.add(stats.num_failovers)
