"""The router's OpenTelemetry signals: one span and a handful of counters per request, nothing per round or token.

Without an exporter all of it is a no-op. Prompts and text never enter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.util.types import AttributeValue

from betoken.common import names
from betoken.common.trace import Span, status_of
from betoken.router.policy.admission import Admission
from betoken.router.record import OK, RequestRecord
from betoken.router.request import GenerationRequest
from betoken.router.round.events import Finished
from betoken.router.round.stats import SpeculationCounts
from betoken.rpc import telemetry

_DEADLINE_LAG_S, _DEADLINE_LAG_SHARE = 0.02, 0.04
"""How much earlier than here a deadline may pass at the client, whose call is then cancelled: the way here, and what
gRPC rounds up. It sends time-outs with two or three digits, and again one that it sent before if that is up to 3 %
longer (`timeout_encoding.cc`, `hpack_encoder.cc`)."""


class RequestMetrics:
    """Instruments of one router. Make it after telemetry is configured."""

    def __init__(self, admission: Admission, max_tenants: int = 100) -> None:
        """`max_tenants`: how many are told apart; those that come later count as one."""
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
        self._failovers = meter.create_counter(names.METRIC_FAILOVERS)

        def running(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(admission.num_running),)

        def waiting(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(admission.num_waiting),)

        # Up-down counters, since routers' numbers add up and a backend goes by the type.
        meter.create_observable_up_down_counter(names.METRIC_REQUESTS_RUNNING, [running])
        meter.create_observable_up_down_counter(names.METRIC_REQUESTS_WAITING, [waiting])

    def ended(self, record: RequestRecord) -> None:
        """Count a request by the status it ended with, record how long it took, and what was done for it.

        Durations of what did not end well have its status as `error.type`.
        """
        counts, tenant = record.counts, self._tenant(record)
        whose = {names.GEN_AI_REQUEST_MODEL: record.model, names.TENANT: tenant}
        how = {names.RPC_RESPONSE_STATUS_CODE: record.status, names.FINISH_REASON: record.finish_reason}
        self._requests.add(1, whose | how)
        attributes = _kind(record.model, record.is_chat)
        if record.status != OK:
            attributes[names.ERROR_TYPE] = record.status
        self._duration.record(record.duration_ns / 1e9, attributes)
        if counts.queue_ns is not None and record.request is not None:
            self._queue.record(counts.queue_ns / 1e9, attributes)
            self._input.add(len(record.request.prompt_ids), whose)
            self._cached_input.add(counts.num_cached_tokens, whose)
            self._output.add(record.num_sent, whose)
        if record.first_token_ns:
            self._first_token.record(record.first_token_ns / 1e9, attributes)
        if record.first_token_ns and record.num_sent > 1:
            decode_ns = record.duration_ns - record.first_token_ns
            self._per_token.record(decode_ns / 1e9 / (record.num_sent - 1), attributes)
        if record.request is not None:
            self._speculated(counts, record.drafter)

    def _tenant(self, record: RequestRecord) -> str:
        tenant = record.request.tenant if record.request is not None else ""
        if len(self._tenants) <= self._max_tenants:
            self._tenants.add(tenant)
        return tenant if tenant in self._tenants else names.OTHER

    def _speculated(self, counts: SpeculationCounts, drafter: str) -> None:
        attributes = {names.DRAFTER: drafter}
        if counts.router_overhead_p50_ns:
            self._overhead.record(counts.router_overhead_p50_ns / 1e9)
        self._drafts.add(counts.num_drafts, attributes)
        self._draft_tokens.add(counts.num_draft_tokens, attributes)
        self._accepted.add(counts.num_accepted_tokens, attributes)
        for position, num_accepted in enumerate(counts.num_accepted_per_position):
            self._accepted_per_position.add(num_accepted, attributes | {names.DRAFT_POSITION: position})
        self._emitted.add(counts.num_emitted_tokens)
        self._failed_drafts.add(counts.num_failed_drafts, attributes)
        self._failovers.add(counts.num_failovers)


def final_status(
    error: BaseException, timeout_s: float | None, time_remaining: Callable[[], float | None], is_cut_off: bool = False
) -> str:
    """The name of the gRPC status of a request that ended with `error`.

    Args:
        error: The handler's error. timeout_s: Seconds that the client's deadline left when the call came; None without
            a deadline. time_remaining: Seconds left now. is_cut_off: By a router that shuts down.
    """
    if isinstance(error, asyncio.CancelledError | grpc.aio.BaseError):  # the second: of a write to a call that is over
        left_s = time_remaining()
        if timeout_s is not None and left_s is not None and left_s <= _DEADLINE_LAG_S + _DEADLINE_LAG_SHARE * timeout_s:
            return "DEADLINE_EXCEEDED"
        return "UNAVAILABLE" if is_cut_off else "CANCELLED"
    return status_of(error) or "INTERNAL"


def describe_request(span: Span, request: GenerationRequest, is_chat: bool) -> None:
    """A request's span attributes, once it is known to be valid."""
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        **_kind(request.model, is_chat),
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_new_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_ids),
        names.TENANT: request.tenant,
        names.DRAFTER: request.drafter.name if request.drafter is not None else "",
        names.NUM_DRAFT_TOKENS: request.num_draft_tokens,
    }
    span.set_attributes(attributes)


def describe_answer(span: Span, event: Finished) -> None:
    """An answer's span attributes."""
    span.set_attributes(
        {
            names.GEN_AI_RESPONSE_FINISH_REASONS: (event.reason.value,),
            names.GEN_AI_USAGE_OUTPUT_TOKENS: event.num_output_tokens,
            names.NUM_ACCEPTED: event.counts.num_accepted_tokens,
            names.QUEUE_MS: event.queue_ns / 1e6,
        }
    )


def _kind(model: str, is_chat: bool) -> dict[str, str]:
    """Attributes of every span and duration of a generation, by the semantic conventions. The model is one that is
    served."""
    return {
        names.GEN_AI_OPERATION_NAME: names.OPERATION_CHAT if is_chat else names.OPERATION_TEXT_COMPLETION,
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER_BETOKEN,
        names.GEN_AI_REQUEST_MODEL: model,
    }
