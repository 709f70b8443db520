"""Rounds with an attached drafter, executed by the verify worker alone: granted in bulk, so that none costs a message.

Knows a session's grants and whether drafts pay; nothing of text.
"""

from __future__ import annotations

import time
from collections import Counter

from betoken.common.economy.gate import PolicyState, SpeculationGate, Step
from betoken.common.economy.terms import USUAL_DRAFT_TOKENS
from betoken.router.policy.named_drafter import NamedDrafterTrials
from betoken.router.request.generation import GenerationRequest
from betoken.router.workers.verify_requests import Grant
from betoken.router.workers.verify_session import VerifySession
from betoken.v1.verify_pb2 import Verdict

NUM_GRANTED_TOKENS = 128
"""Tokens granted at once; renewed when half of them are there."""


class AttachedRounds:
    """The attached rounds of one request."""

    def __init__(self, request: GenerationRequest, gate: SpeculationGate | None) -> None:
        """`gate`: says whether drafts pay, and hears how fast tokens come; None = they are wanted in any case."""
        self._request = request
        self._gate = gate
        self._trials = NamedDrafterTrials(is_named=request.is_drafter_fixed)
        self.failures: Counter[str] = Counter()
        """Failed drafts by reason."""

    @property
    def state(self) -> PolicyState:
        """Whether the request speculates, and why."""
        return self._gate.state if self._gate is not None else PolicyState(True, 0.0, "not a choice of the router")

    def renew(self, session: VerifySession, length: int, room: int) -> None:
        """Grant more where half of it is used, or where drafts began, or ceased, to pay."""
        num_draft_tokens = self._request.num_draft_tokens or USUAL_DRAFT_TOKENS
        if self._gate is not None and not self._gate.is_open and not self._trials.is_due:
            num_draft_tokens = 0
        num_tokens = min(NUM_GRANTED_TOKENS, room)
        num_left = session.granted.end - length
        is_due = num_left <= NUM_GRANTED_TOKENS // 2 and num_tokens > num_left
        if is_due or num_draft_tokens != session.granted.num_draft_tokens:
            is_priced = not self._request.num_draft_tokens
            session.grant(Grant(length, num_tokens, num_draft_tokens, is_priced))

    def record(self, verdict: Verdict, num_tokens: int, began_s: float | None, row_s: float = 0.0) -> None:
        """A round, or a plain step, brought `num_tokens`; `began_s`: when it began (`time.perf_counter`), None = it
        is not evidence about drafts. `row_s`: as in `Step`."""
        is_drafted = verdict.HasField("attached")
        if is_drafted and verdict.attached.is_failed:
            self.failures["fault"] += 1
        self._trials.add_tokens(num_tokens)
        if is_drafted:
            self._trials.tried()
        if self._gate is None or began_s is None:
            return
        num_rows, drafting_s = 1 + verdict.num_draft_tokens, verdict.attached.forward_ns * 1e-9
        step = Step(began_s, time.perf_counter(), num_tokens, num_rows, drafting_s, row_s)
        if is_drafted == self._gate.is_open:
            self._gate.record(step)
        elif is_drafted:
            self._gate.learn(step)
