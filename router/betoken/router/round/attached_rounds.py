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
from betoken.v1.verify_pb2 import VerificationResult

NUM_GRANTED_TOKENS = 128
"""Tokens granted at once; renewed when half of them are there."""


class AttachedRounds:
    """The attached rounds of one request."""

    def __init__(self, request: GenerationRequest, policy: SpeculationPolicy | None, drafter: str = "") -> None:
        """`policy`: decides whether the request drafts; None = it always drafts. `drafter`: named in grants; empty =
        the drafter of the open entry."""
        self._drafter = drafter
        self.is_tried = False
        """Whether it drafts whatever the policy says, because its speed is measured."""
        self._request = request
        self._policy = policy
        self._trials = NamedDrafterTrials(is_named=request.is_drafter_fixed)
        self.failures: Counter[str] = Counter()
        """Failed drafts by reason."""

    @property
    def state(self) -> PolicyState:
        """Whether the request speculates, and why."""
        return self._policy.state if self._policy is not None else PolicyState(True, 0.0, "not a choice of the router")

    def renew(self, session: VerifySession, length: int, room: int, most: int = NUM_GRANTED_TOKENS) -> None:
        """Grant more where half of it is used, or where drafts began, or ceased, to pay."""
        num_draft_tokens = self._request.num_draft_tokens or USUAL_DRAFT_TOKENS
        is_on = self._policy is None or self._policy.is_on or self.is_tried
        if not is_on and not self._trials.is_due:
            num_draft_tokens = 0
        num_tokens = min(most, room)
        num_left = session.granted.end - length
        is_due = num_left <= most // 2 and num_tokens > num_left
        is_other = self._drafter != session.granted.drafter and num_draft_tokens > 0
        if is_due or is_other or num_draft_tokens != session.granted.num_draft_tokens:
            is_priced = not self._request.num_draft_tokens
            session.grant(Grant(length, num_tokens, num_draft_tokens, is_priced, self._drafter))

    def record(
        self, result: VerificationResult, num_tokens: int, began_s: float | None, times: ForwardTimes = NO_TIMES
    ) -> bool:
        """Add a round or a decode step of `num_tokens`; return whether it was a round. `began_s`: its start
        (`time.perf_counter`), None = it is not evidence about drafts. `times`: as in `Step`."""
        is_drafted = result.HasField("attached")
        if is_drafted and result.attached.is_failed:
            self.failures["fault"] += 1
        self._trials.add_tokens(num_tokens)
        if is_drafted:
            self._trials.tried()
        if self._policy is None or began_s is None:
            return is_drafted
        num_rows, drafting_s = 1 + result.num_draft_tokens, result.attached.forward_ns * 1e-9
        step = Step(began_s, time.perf_counter(), num_tokens, num_rows, drafting_s, times)
        if is_drafted == self._policy.is_on:
            self._policy.record(step)
        elif is_drafted:
            self._policy.learn(step)
        return is_drafted
