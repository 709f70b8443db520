"""Rounds with an attached drafter, executed by the verify worker alone: granted in bulk, so that none costs a message.

Knows a session's grants and whether drafts pay; nothing of text.
"""

from __future__ import annotations

import time

from betoken.common.economy.gate import SpeculationGate, Step
from betoken.common.economy.terms import USUAL_DRAFT_TOKENS
from betoken.router.request import GenerationRequest
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
        self.num_failed = 0
        """Drafts that failed."""

    def renew(self, session: VerifySession, length: int, room: int) -> None:
        """Grant more where half of it is used, or where drafts began, or ceased, to pay."""
        num_draft_tokens = self._request.num_draft_tokens or USUAL_DRAFT_TOKENS
        if self._gate is not None and not self._gate.is_open:
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
        self.num_failed += is_drafted and verdict.attached.is_failed
        if self._gate is not None and began_s is not None and is_drafted == self._gate.is_open:
            num_rows, drafting_s = 1 + verdict.num_draft_tokens, verdict.attached.forward_ns * 1e-9
            self._gate.record(Step(began_s, time.perf_counter(), num_tokens, num_rows, drafting_s, row_s))
