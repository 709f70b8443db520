"""The speculation policies of a router: one for each kind of requests, made when its first request arrives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from opentelemetry.metrics import CallbackOptions, Observation

from betoken.common import names
from betoken.common.economy.policy import PolicyState, SpeculationPolicy, load_level
from betoken.common.economy.source_rates import SourceRates
from betoken.router.policy.admission import Admission
from betoken.router.request.generation import GenerationRequest
from betoken.router.workers.fleet import Fleet
from betoken.rpc import telemetry
from betoken.v1.generation_pb2 import SpeculationPolicy as PolicyMessage
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED


class DraftSource(NamedTuple):
    """A drafter of this name: attached to verify workers, or hosted by draft workers."""

    name: str
    is_attached: bool


class PolicyKind(NamedTuple):
    """Requests whose drafts are accepted about equally often."""

    drafter: str
    is_attached: bool
    is_sampled: bool
    has_prediction: bool

    @classmethod
    def of(cls, request: GenerationRequest, *, is_attached: bool) -> PolicyKind:
        """Return the kind of a request."""
        name = request.drafter.name if request.drafter is not None else ""
        return cls(name, is_attached, request.sampling.temperature > 0.0, bool(request.predicted_ids))

    def message(self, state: PolicyState) -> PolicyMessage:
        """Return the state of this kind's policy as clients receive it."""
        return PolicyMessage(
            drafter=self.drafter,
            is_attached=self.is_attached,
            is_sampled=self.is_sampled,
            has_prediction=self.has_prediction,
            is_on=state.is_on,
            expected_speedup=state.expected_speedup,
            reason=f"{'on' if state.is_on else 'off'}: {state.reason}",
        )


class SpeculationPolicies:
    """The policies of all kinds of requests served so far."""

    def __init__(self, admission: Admission, fleet: Fleet, *, drafts_must_pay: bool = True) -> None:
        """`drafts_must_pay`: value of --drafts-must-pay; without it every request speculates."""
        self._admission = admission
        self._fleet = fleet
        self._drafts_must_pay = drafts_must_pay
        self._policies: dict[PolicyKind, SpeculationPolicy] = {}
        self._rates: dict[tuple[bool, bool], SourceRates[DraftSource]] = {}

    def of(self, request: GenerationRequest, *, is_attached: bool = False) -> SpeculationPolicy | None:
        """Return the policy of a request; None if it always speculates: the drafter is not known here, the request
        leaves no choice, or its tokens depend on drafts."""
        pool = self._fleet.verify if is_attached else self._fleet.draft
        if not self._drafts_must_pay or request.drafter is None or request.drafter.name not in pool.known_drafters:
            return None
        if request.num_draft_tokens or request.mode != VERIFICATION_MODE_COUPLED:
            return None
        kind = PolicyKind.of(request, is_attached=is_attached)
        if kind not in self._policies:
            self._policies[kind] = SpeculationPolicy(self._num_running)
        return self._policies[kind]

    def rates_of(self, request: GenerationRequest) -> SourceRates[DraftSource]:
        """Return the measured rates of all sources for requests like this one."""
        kind = request.sampling.temperature > 0.0, bool(request.predicted_ids)
        return self._rates.setdefault(kind, SourceRates())

    @property
    def load_level(self) -> int:
        """Level of the present load."""
        return load_level(self._num_running())

    def _num_running(self) -> int:
        return self._admission.num_running

    def states(self) -> list[tuple[PolicyKind, PolicyState]]:
        """Return the state of every policy. Safe to call from another thread."""
        return [(kind, policy.state) for kind, policy in list(self._policies.items())]

    def messages(self) -> list[PolicyMessage]:
        """Return the state of every policy as clients receive it."""
        return [kind.message(state) for kind, state in self.states()]

    def observe(self) -> None:
        """Create the gauges of the policies, after telemetry is configured."""

        def attributes(kind: PolicyKind) -> dict[str, str | bool]:
            own = {names.DRAFTER_ATTACHED: kind.is_attached, names.SAMPLED: kind.is_sampled}
            return {names.DRAFTER: kind.drafter, **own, names.PREDICTED: kind.has_prediction}

        def is_on(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(int(state.is_on), attributes(kind)) for kind, state in self.states()]

        def speedup(_: CallbackOptions) -> Iterable[Observation]:
            known = [(kind, state) for kind, state in self.states() if state.expected_speedup]
            return [Observation(state.expected_speedup, attributes(kind)) for kind, state in known]

        meter = telemetry.meter()
        meter.create_observable_gauge(names.METRIC_SPECULATION_ON, [is_on])
        meter.create_observable_gauge(names.METRIC_EXPECTED_SPEEDUP, [speedup])
