"""The source that drafts for one request: the drafter it names or, for `auto`, the fastest at present.

Sources are attached drafters of the request's verify worker and hosted drafters of the draft workers. The speculation
policy of a source decides whether its drafts pay at the present load. Knows names and rates; no rounds and no text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.economy.source_rates import Candidate
from betoken.common.step_times import ForwardTimes
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.attached_rounds import NUM_GRANTED_TOKENS, AttachedRounds
from betoken.router.round.speculation_policies import DraftSource, PolicyKind, SpeculationPolicies
from betoken.router.round.speculator import Speculator
from betoken.router.workers.fleet import Fleet
from betoken.router.workers.verify_session import VerifySession
from betoken.router.workers.verify_worker import VerifyWorker
from betoken.v1.generation_pb2 import SpeculationPolicy as PolicyMessage
from betoken.v1.verify_pb2 import VerificationResult

_CONSTRAINT_DRAFTER = "grammar"
"""Drafter that has nothing to propose without a constraint."""
SETTLING_TOKENS = 16
"""Tokens after a change that the source before may still have drafted."""


class RequestSources:
    """The sources of one request: the present one and earlier ones."""

    def __init__(
        self,
        request: GenerationRequest,
        worker: VerifyWorker,
        fleet: Fleet,
        policies: SpeculationPolicies,
        make_speculator: Callable[[GenerationRequest, SpeculationPolicy | None], Speculator],
    ) -> None:
        """`worker`: the verify worker that the request starts on."""
        self._request = request
        self._worker = worker
        self._fleet = fleet
        self._policies = policies
        self._make_speculator = make_speculator
        self._rates = policies.rates_of(request).open() if request.is_auto else None
        self._speculators: dict[str, Speculator] = {}
        self._attached: dict[str, AttachedRounds] = {}
        self._settled_at = 0
        """Committed length from which only the present source drafts."""
        name = request.drafter.name if request.drafter is not None else ""
        self._source = DraftSource(name, False)
        if self._rates is not None:
            self._source = DraftSource("", False)
            self._choose(len(request.prompt_ids) + len(request.resume_ids))

    @property
    def drafter(self) -> str:
        """Name of the present source; empty if no worker hosts it."""
        return self._fleet.hosted(self._source.name)

    @property
    def is_attached(self) -> bool:
        """Whether the verify worker drafts."""
        return self._source.is_attached

    @property
    def speculator(self) -> Speculator:
        """Drafts of the draft worker's drafter of the present name."""
        name = self._source.name
        if name not in self._speculators:
            request = self._request.with_drafter(name)
            self._speculators[name] = self._make_speculator(request, self._policies.of(request))
        return self._speculators[name]

    @property
    def attached(self) -> AttachedRounds:
        """Rounds with the attached drafter of the present name."""
        name = self._source.name
        if name not in self._attached:
            policy = self._policies.of(self._request.with_drafter(name), is_attached=True)
            drafter = name if self._rates is not None else ""
            self._attached[name] = AttachedRounds(self._request, policy, drafter)
        return self._attached[name]

    @property
    def failures(self) -> Counter[str]:
        """Failed drafts of all sources, by reason."""
        every: list[Speculator | AttachedRounds] = [*self._speculators.values(), *self._attached.values()]
        return sum((each.failures for each in every), Counter[str]())

    @property
    def worker_ids(self) -> list[str]:
        """Ids of the draft workers that had the request open, each once."""
        return list(dict.fromkeys(id_ for each in self._speculators.values() for id_ in each.worker_ids))

    @property
    def is_synthetic(self) -> bool:
        """Whether one of them simulates its model."""
        return any(each.is_synthetic for each in self._speculators.values())

    @property
    def policy(self) -> PolicyMessage:
        """Whether the request speculates with the present source, and why."""
        request, is_attached = self._request.with_drafter(self._source.name), self._source.is_attached
        state = self.attached.state if is_attached else self.speculator.policy_state
        return PolicyKind.of(request, is_attached=is_attached).message(state)

    def opened(self, worker: VerifyWorker, session: VerifySession, length: int) -> None:
        """The sequence of this committed length was opened at a verify worker."""
        self._worker = worker
        if self._rates is None:
            self._source = self._source._replace(is_attached=session.can_attach)
        elif self._source.is_attached and self._source.name not in worker.hello.drafters:
            self._choose(length)
        self._settled_at = length

    def update(self, length: int) -> None:
        """Change the source of the rounds after `length` committed tokens, if another is faster or due for a trial."""
        if self._rates is not None and self._rates.is_due:
            self._choose(length)

    def renew(self, session: VerifySession, length: int, room: int) -> None:
        """Grant attached rounds; few at once if the source may change."""
        most = NUM_GRANTED_TOKENS
        if self._rates is not None:
            most //= 2 if self._rates.base is None else 4
        self.attached.renew(session, length, room, most)

    def commit(
        self, length: int, ids: Sequence[int], result: VerificationResult, began_s: float | None, times: ForwardTimes
    ) -> None:
        """Report the tokens committed after `length` to the source and the speculation policy.

        `began_s`: start of the step that decided them (`time.perf_counter`); None = the step is not evidence about
            drafts. `times`: as in `Step`.
        """
        if length < self._settled_at or (result.HasField("attached") and not self._source.is_attached):
            began_s = None
        is_drafted: bool | None
        if self._source.is_attached:
            is_drafted = self.attached.record(result, len(ids), began_s, times)
        else:
            is_drafted = self.speculator.commit(length, ids, began_s, times)
        if self._rates is None:
            return
        for name, other in self._speculators.items():
            if name != self._source.name or self._source.is_attached:
                other.commit(length, ids, None)
        if began_s is not None and is_drafted is not None:
            source, seconds = self._source if is_drafted else None, time.perf_counter() - began_s
            self._rates.add(source, self._policies.load_level, len(ids), seconds)
        self._rates.add_tokens(len(ids))

    def forgive(self) -> None:
        """The request was taken once: a later rejection of its settings does not fail it."""
        self.speculator.forgive()

    def close(self) -> None:
        """Free the sequence on the draft workers; idempotent."""
        for each in self._speculators.values():
            each.close()

    def end(self) -> None:
        """Close, and leave the running sequences."""
        for each in self._speculators.values():
            each.end()

    def _choose(self, length: int) -> None:
        rates = self._rates
        assert rates is not None
        chosen = rates.choose(self._candidates(length), self._policies.load_level) or DraftSource("", False)
        if chosen != self._source:
            if (left := self._speculators.get(self._source.name)) is not None:
                left.length.end()
            self._source, self._settled_at = chosen, length + SETTLING_TOKENS
            for name, each in self._speculators.items():
                if DraftSource(name, False) not in (chosen, rates.base):
                    each.close()
        is_tried = rates.base is not None
        if chosen.is_attached:
            self.attached.is_tried = is_tried
        else:
            self.speculator.timer.is_tried = is_tried

    def _candidates(self, length: int) -> dict[DraftSource, Candidate]:
        """The sources that can draft now, the default first; an attached drafter before a remote one of its name."""
        attached, remote = self._worker.hello.drafters, self._fleet.draft.ready_drafters
        sources = [
            DraftSource(name, is_attached)
            for name in dict.fromkeys((*remote, *attached))
            for is_attached in (True, False)
            if name in (attached if is_attached else remote)
        ]
        has_constraint = self._request.constraint is not None
        return {
            source: self._candidate(source, length)
            for source in sources
            if has_constraint or source.name != _CONSTRAINT_DRAFTER
        }

    def _num_missing(self, source: DraftSource, length: int) -> int:
        speculator = self._speculators.get(source.name)
        is_held = source.is_attached or (speculator is not None and speculator.is_open)
        return 0 if is_held else length

    def _candidate(self, source: DraftSource, length: int) -> Candidate:
        policy = self._policies.of(self._request.with_drafter(source.name), is_attached=source.is_attached)
        num_missing = self._num_missing(source, length)
        if policy is None:
            return Candidate(num_missing)
        return Candidate(num_missing, not policy.is_known_off, lambda: policy.trial_loss(self._worker.forward_times))
