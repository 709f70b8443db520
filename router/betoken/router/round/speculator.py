"""The drafts of one request: opens it on a draft worker, follows it, and absorbs every fault there.

A fault costs this round its draft and the worker some trust, never more. `drafting` has the states and their table.
Knows nothing of verification results or text.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from betoken.common.economy.policy import PolicyState, SpeculationPolicy
from betoken.common.economy.terms import MAX_DRAFT_TOKENS
from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from betoken.common.step_times import NO_TIMES, ForwardTimes
from betoken.router.policy.draft_terms import draft_terms, terms_entry
from betoken.router.policy.named_drafter import NamedDrafterTrials
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.adaptive_length import AdaptiveLength
from betoken.router.round.draft_errors import failure_reason, of_request
from betoken.router.round.draft_timeouts import MAX_MISSED_TOKENS, DraftTimeouts
from betoken.router.round.drafting import DraftingEvent, DraftingState, after
from betoken.router.round.step_timer import StepTimer
from betoken.router.workers.draft import NO_DRAFT, Draft
from betoken.router.workers.draft_pool import DraftPool
from betoken.router.workers.draft_session import (
    DraftFailedError,
    DraftLateError,
    DraftSession,
    DraftTimeoutError,
    DraftUnavailableError,
    DraftWorkerLostError,
)
from betoken.router.workers.draft_worker import DraftWorker
from betoken.router.workers.drafter_record import DraftedRound, DrafterRecord
from betoken.rpc.validation import CONTEXT_FIELDS
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED, DrafterChoice, Load

_log = logging.getLogger(__name__)
_FULL_PAUSE_S = 1.0
"""How long a worker that had no room for a request is not asked by it again: a refusal costs a round its draft."""
_NO_FAULTS = (DraftWorkerLostError, DraftUnavailableError, DraftTimeoutError, DeadlineExceededError)
"""Not a new fault of the worker: it was replaced, has recorded the timeout, or met the request's own deadline."""


class Speculator:
    """The drafts of one request."""

    def __init__(
        self,
        request: GenerationRequest,
        pool: DraftPool,
        vocab_size: int,
        timeouts: DraftTimeouts,
        policy: SpeculationPolicy | None = None,
        num_outcomes: int = 0,
        *,
        is_overlap_automatic: bool = False,
    ) -> None:
        """`policy`: decides whether the request drafts and how much; None = it always drafts.
        `num_outcomes`: outcomes of each verification that the drafter drafts ahead for, unless tokens depend on drafts.
        `is_overlap_automatic`: whether it does so only while measured times say that this is faster.
        """
        self._request = request
        self._pool = pool
        self._vocab_size = vocab_size
        self._timeouts = timeouts
        self._policy = policy
        self._may_be_late = request.mode == VERIFICATION_MODE_COUPLED  # else the clock would choose tokens
        self._num_outcomes = num_outcomes if self._may_be_late else 0
        self._is_overlap_automatic = is_overlap_automatic
        self._record: DrafterRecord | None = None
        """Evidence about the drafter that has the sequence open."""
        self._num_resyncs = 0
        """`DrafterRecord.num_resyncs` when it was opened."""
        self._round: DraftedRound | None = None
        """The round under verification."""
        self.length = AdaptiveLength(request.num_draft_tokens, policy)
        self.timer = StepTimer(policy, is_named=request.is_drafter_fixed)
        self._state = DraftingState.CLOSED
        self._worker: DraftWorker | None = None
        """The worker asked last."""
        self._session: DraftSession | None = None
        """The sequence there; None while the state says that none is open."""
        self._full_until_s: dict[DraftWorker, float] = {}
        """Workers that had no room for it, and until when they are not asked (`time.monotonic`, s)."""
        has_settings = request.drafter is not None and bool(request.drafter.settings)
        self._has_untried_settings = has_settings and not request.has_begun
        """Only a draft worker knows whether they are good: one draft is asked for even if drafts do not pay."""
        self._trials = NamedDrafterTrials(is_named=request.is_drafter_fixed)
        self.failures: Counter[str] = Counter()
        """Drafts that were late, invalid or failed, by reason."""
        self.worker_ids: list[str] = []
        """Ids of the workers that had it open, in their order, each once."""
        self.is_synthetic = False  # whether one of them simulates its model

    @property
    def is_open(self) -> bool:
        """Whether a draft worker has the sequence open."""
        return self._session is not None

    @property
    def is_available(self) -> bool:
        """Whether a draft may be asked for, and pays."""
        if not ((self._is_on and not self.length.is_paused) or self._has_untried_settings or self._trials.is_due):
            return False
        if self._session is None:
            return self._choose() is not None
        return not self._session.is_late and not self._is_worker_silent

    @property
    def policy_state(self) -> PolicyState:
        """Whether the request speculates, and why."""
        if self._state is DraftingState.REFUSED:
            return PolicyState(False, 0.0, "the drafter rejects this request")
        if self._is_worker_silent:
            return PolicyState(False, 0.0, "the draft worker gives no sign of work")
        if self._session is None and self._choose() is None:
            return PolicyState(False, 0.0, "no draft worker is available")
        return self._policy.state if self._policy is not None else PolicyState(True, 0.0, "not a choice of the router")

    @property
    def _is_on(self) -> bool:
        """Whether the speculation policy lets the request draft."""
        return self._policy is None or self._policy.is_on or self.timer.is_tried

    async def draft(
        self,
        committed_ids: Sequence[int],
        room: int,
        takes_trees: bool,
        load: Load | None = None,
        forward_s: float = 0.0,
        times: ForwardTimes = NO_TIMES,
    ) -> Draft:
        """At most `room` guesses at what follows the prompt and `committed_ids`; empty when there are none.

        They are a chain, unless the target `takes_trees`. How many they are is the request's, or else what pays under
        the `load` and the forward `times` of the verify worker. `forward_s`: time of its recent forwards, seconds;
        0 = not known.

        Raises:
            InvalidArgumentError: the drafter refuses the request's own settings for it before a token is there.
        """
        if committed_ids:  # the client has read of it
            self.forgive()
        if self._is_to_be_resynchronised:
            self.failures["collapse"] += 1
            self.close()
        can_pause = self._is_on and not self._has_untried_settings
        length = len(self._request.prompt_ids) + len(committed_ids)
        is_free = not can_pause or self.is_open or self._trials.is_due or self.timer.is_tried
        if not is_free and not self.length.pays_opening(length, self._request.max_length - length, times):
            return NO_DRAFT
        if not (num_tokens := self.length.next(times, room, can_pause=can_pause)):
            return NO_DRAFT
        self.timer.asks(is_first=self._state in (DraftingState.CLOSED, DraftingState.PREFILLING))
        try:
            if self._session is None:
                self._open(committed_ids)
            elif self._may_be_late and self._state.has_drafted and self._session.num_missed_tokens > MAX_MISSED_TOKENS:
                self.timer.asks(is_first=True)
                await self._session.catch_up(length, committed_ids[-1])
                self._went(DraftingEvent.OVERDUE)
                return NO_DRAFT
            timeout_s = self._timeouts.of_round(forward_s)
            draft = await self._ask(committed_ids, room, num_tokens, takes_trees, load, timeout_s)
        except DraftLateError as error:
            self._late(error)
            return NO_DRAFT
        except (DraftFailedError, BetokenError) as error:
            self._failed(error)
            return NO_DRAFT
        self._went(DraftingEvent.CAME)
        self._trials.tried()
        self._has_untried_settings = False
        return draft

    def commit(
        self, base_length: int, ids: Sequence[int], began_s: float | None, times: ForwardTimes = NO_TIMES
    ) -> bool | None:
        """Report the tokens committed after `base_length` to the drafter and the speculation policy. Return whether the
        step was made with drafts; None = its time says nothing.

        `began_s`: start of the step that decided them (`time.perf_counter`); None = the step is not evidence about
            drafts. `times`: as in `Step`.
        """
        self.length.add_tokens(len(ids))
        can_draft = self._session is not None and not self._session.is_late
        is_drafted = self.timer.commit(len(ids), began_s, time.perf_counter(), times, can_draft=can_draft)
        self._trials.add_tokens(len(ids))
        if self._round is not None and self._record is not None and began_s is not None:
            self._record.record(self._round, min(len(ids) - 1, self._round.num_tokens), time.perf_counter())
        self._round = None
        if self._session is None:
            return is_drafted
        is_draining = self._worker is not None and self._worker.is_draining
        has_other = self._is_worker_silent and self._choose() is not None
        if has_other or (is_draining and (not self._is_on or self._choose() is not None)):
            self.close()
        else:
            self._session.commit(base_length, ids)
            if self._worker is not None:
                self._worker.trials.add_tokens(len(ids))
        return is_drafted

    def forgive(self) -> None:
        """The request was taken once: whoever refuses its settings now, and how late, ends no answer."""
        self._has_untried_settings = False

    def end(self) -> None:
        """Close, and leave the running sequences."""
        self.close()
        self.length.end()

    def close(self) -> None:
        """Free the sequence on the draft worker; idempotent. The next `draft` opens it again."""
        self._went(DraftingEvent.CLOSED)

    def _went(self, event: DraftingEvent) -> None:
        """Enter the state after `event`; one without an open sequence frees it on the worker."""
        self._state = after(self._state, event)
        if not self._state.is_open and self._session is not None:
            session, self._session = self._session, None
            session.close()

    @property
    def _is_worker_silent(self) -> bool:
        """Whether the worker asked last has missed a draft and given no sign of work since."""
        return self._worker is not None and self._worker.is_silent

    @property
    def _is_to_be_resynchronised(self) -> bool:
        """Whether the drafter's acceptance has collapsed since the sequence was opened, and tokens do not depend on
        drafts: the sequence is then opened again from its ids."""
        if self._session is None or self._record is None or not self._may_be_late:
            return False
        return self._record.num_resyncs > self._num_resyncs

    async def _ask(
        self,
        committed_ids: Sequence[int],
        room: int,
        num_tokens: int,
        takes_trees: bool,
        load: Load | None,
        timeout_s: float,
    ) -> Draft:
        """The draft of the worker that has the sequence open."""
        worker, session = self._worker, self._session
        assert worker is not None and session is not None
        limit = min(room, worker.hello.max_draft_tokens or MAX_DRAFT_TOKENS)
        terms = None
        if load is not None and not self._request.num_draft_tokens:
            terms = draft_terms(load, limit, worker.asking.mean_s)
        if terms is not None:
            terms = worker.trials.terms(terms)
        asked_s = time.perf_counter()
        num_tokens = min(limit, num_tokens)
        num_outcomes = self._num_outcomes if room > num_tokens + 1 else 0  # another draft will follow
        if self._is_overlap_automatic and self._record is not None and not self._record.overlap.is_on:
            num_outcomes = 0
        draft = await session.draft(
            len(self._request.prompt_ids) + len(committed_ids),
            (committed_ids or self._request.prompt_ids)[-1],
            num_tokens,
            self._vocab_size,
            timeout_s if self._may_be_late or self._state.has_drafted else self._timeouts.first_s,
            may_be_late=self._may_be_late,
            takes_trees=takes_trees,
            terms=terms_entry(terms) if terms is not None else None,
            num_outcomes=num_outcomes,
        )
        now_s = time.perf_counter()
        waited_s = now_s - asked_s
        if not self._state.has_drafted:
            self.length.came_first(now_s)
        if draft.ids and not draft.parents and self._state.has_drafted:
            is_hit = None if draft.num_ahead_ids is None else draft.num_ahead_ids > 0
            self._round = DraftedRound(len(draft.ids), waited_s, is_hit, num_outcomes > 0, now_s)
        if self._state.has_drafted:  # not the first, which waits for the prompt's prefill
            worker.asking.record(waited_s - draft.forward_ns * 1e-9)
            self.length.came(draft, waited_s)
        self.timer.came(len(draft.ids), waited_s)
        if terms is not None:
            worker.trials.came(terms, len(draft.ids))
        worker.breaker.record_success()
        return draft

    def _choose(self) -> DraftWorker | None:
        """A worker with the wanted drafter; where those that host it are away any, unless the client named one."""
        drafter = self._request.drafter
        if drafter is None or self._state is DraftingState.REFUSED:
            return None
        now_s = time.monotonic()
        full = [worker for worker, until_s in self._full_until_s.items() if now_s < until_s]
        worker = self._pool.least_loaded(drafter.name, full)
        is_hosted = not drafter.name or drafter.name in self._pool.known_drafters
        if worker is None and is_hosted and not self._request.is_drafter_fixed:
            worker = self._pool.least_loaded("", full)
        return worker

    def _open(self, committed_ids: Sequence[int]) -> None:
        worker, drafter = self._choose(), self._request.drafter
        if worker is None or drafter is None:
            raise DraftUnavailableError("no draft worker is available")
        self._worker = worker
        if drafter.name and drafter.name not in worker.drafters:
            drafter = DrafterChoice()  # the worker's default
        self._session = worker.open(self._request, committed_ids, drafter)
        self.length.opens(len(self._request.prompt_ids) + len(committed_ids), time.perf_counter())
        self._record = worker.record_of(drafter.name)
        self._num_resyncs = self._record.num_resyncs
        self._went(DraftingEvent.OPENED)
        self.is_synthetic |= worker.hello.is_synthetic
        if worker.id not in self.worker_ids:
            self.worker_ids.append(worker.id)

    def _late(self, error: DraftLateError) -> None:
        if not self.failures:
            _log.info("request %s goes without drafts until one has come: %s", self._request.request_id, error)
        self.failures["timeout"] += 1
        if self._state.has_drafted:  # else the draft that is still to come is the trial
            self._trials.tried()
        self._went(DraftingEvent.OVERDUE)

    def _failed(self, error: Exception) -> None:
        self.failures[failure_reason(error)] += 1
        self._trials.tried()
        is_refusal = isinstance(error, InvalidArgumentError)  # its own fault: others may go on drafting there
        self._went(DraftingEvent.REFUSED if is_refusal else DraftingEvent.FAILED)
        if isinstance(error, InvalidArgumentError):
            may_be_settings = self._has_untried_settings and error.field not in CONTEXT_FIELDS
            if may_be_settings:
                raise of_request(error, self._request) from error
        elif (worker := self._worker) is not None and isinstance(error, ResourceExhaustedError):
            self._full_until_s[worker] = time.monotonic() + _FULL_PAUSE_S  # other routers filled it: it works
        elif worker is not None and not isinstance(error, _NO_FAULTS):
            worker.breaker.record_failure()
        address = self._worker.link.address if self._worker is not None else "anywhere"
        _log.info("request %s: no draft from %s: %s", self._request.request_id, address, error)
