"""Rounds with an attached drafter, executed by the verify worker alone: granted in bulk, so that none costs a message.

Knows a session's grants and whether drafts pay; nothing of text.
"""

from __future__ import annotations

import time
from collections import Counter

from betoken.common.economy.policy import PolicyState, SpeculationPolicy, Step
from betoken.common.economy.terms import USUAL_DRAFT_TOKENS
from betoken.common.step_times import NO_TIMES, ForwardTimes
from betoken.router.policy.named_drafter import NamedDrafterTrials
from betoken.router.request.generation import GenerationRequest
from betoken.router.workers.verify_requests import Grant
from betoken.router.workers.verify_session import VerifySession
from betoken.v1.verify_pb2 import Verdict

NUM_GRANTED_TOKENS = 128
"""Tokens granted at once; renewed when half of them are there."""


class AttachedRounds:
    """The attached rounds of one request."""

    def __init__(self, request: GenerationRequest, policy: SpeculationPolicy | None) -> None:
        """`policy`: decides whether the request drafts; None = it always drafts."""
        self._request = request
        self._policy = policy
        self._trials = NamedDrafterTrials(is_named=request.is_drafter_fixed)
        self.failures: Counter[str] = Counter()
        """Failed drafts by reason."""

    @property
    def state(self) -> PolicyState:
        """Whether the request speculates, and why."""
        return self._policy.state if self._policy is not None else PolicyState(True, 0.0, "not a choice of the router")

    def renew(self, session: VerifySession, length: int, room: int) -> None:
        """Grant more where half of it is used, or where drafts began, or ceased, to pay."""
        num_draft_tokens = self._request.num_draft_tokens or USUAL_DRAFT_TOKENS
        if self._policy is not None and not self._policy.is_on and not self._trials.is_due:
            num_draft_tokens = 0
        num_tokens = min(NUM_GRANTED_TOKENS, room)
        num_left = session.granted.end - length
        is_due = num_left <= NUM_GRANTED_TOKENS // 2 and num_tokens > num_left
        if is_due or num_draft_tokens != session.granted.num_draft_tokens:
            is_priced = not self._request.num_draft_tokens
            session.grant(Grant(length, num_tokens, num_draft_tokens, is_priced))

    def record(self, verdict: Verdict, num_tokens: int, began_s: float | None, times: ForwardTimes = NO_TIMES) -> None:
        """Add a round or a decode step of `num_tokens`; `began_s`: its start (`time.perf_counter`), None = it is not
        evidence about drafts. `times`: as in `Step`."""
        is_drafted = verdict.HasField("attached")
        if is_drafted and verdict.attached.is_failed:
            self.failures["fault"] += 1
        self._trials.add_tokens(num_tokens)
        if is_drafted:
            self._trials.tried()
        if self._policy is None or began_s is None:
            return
        num_rows, drafting_s = 1 + verdict.num_draft_tokens, verdict.attached.forward_ns * 1e-9
        step = Step(began_s, time.perf_counter(), num_tokens, num_rows, drafting_s, times)
        if is_drafted == self._policy.is_on:
            self._policy.record(step)
        elif is_drafted:
            self._policy.learn(step)
