"""One request from its first block to its last token: rounds of draft, verify, commit; plain steps; failover.

Reads like the algorithm; knows sessions, not links, and emits tokens, not messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from betoken.common.economy.terms import EmptyDraftPause
from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError
from betoken.router.request import GenerationRequest
from betoken.router.round.attached_rounds import AttachedRounds
from betoken.router.round.failover import Failover
from betoken.router.round.outbox import Outbox
from betoken.router.round.speculator import Speculator, of_request
from betoken.router.round.stats import SpeculationCounts
from betoken.router.text.answer import Answer, Kept
from betoken.router.workers.attached_draft import AttachedDraft, attached_draft
from betoken.router.workers.draft_session import NO_DRAFT, Draft
from betoken.router.workers.verify_pool import VerifyWorker
from betoken.router.workers.verify_session import SequenceLostError, VerifySession
from betoken.v1.generation_pb2 import RoundTimes
from betoken.v1.types_pb2 import (
    TOKEN_ORIGIN_ACCEPTED,
    TOKEN_ORIGIN_BONUS,
    TOKEN_ORIGIN_PLAIN,
    TOKEN_ORIGIN_RECOVERED,
    VERIFICATION_MODE_COUPLED,
)
from betoken.v1.verify_pb2 import Verdict

_log = logging.getLogger(__name__)

NUM_GRANTED_STEPS = 16
"""Plain steps granted at once; renewed when half of them are done."""
_BEHIND_S = 1.0
"""How long a client's answer may be full before its sequence is closed on the workers, till it has read."""


class Generation:
    """The state of one admitted request."""

    def __init__(
        self,
        request: GenerationRequest,
        answer: Answer,
        worker: VerifyWorker,
        speculator: Speculator,
        failover: Failover,
        outbox: Outbox,
        counts: SpeculationCounts,
        attached: AttachedRounds,
    ) -> None:
        """`answer` holds the request's resume_ids already; `counts` are filled, up to where it ends."""
        self._request = request
        self._answer = answer
        self._worker = worker
        self._speculator = speculator
        self._failover = failover
        self._outbox = outbox
        self._identity = worker.identity
        self._session: VerifySession | None = None
        self._pause = EmptyDraftPause()
        self._step_began_s: float | None = None
        """Start of the step under way (perf_counter, s). None: its time tells nothing of drafts (prefill, failover)."""
        self._began_ns = 0
        """Start of the round, plain step or re-opening under way, `time.perf_counter_ns()`."""
        self._length = len(request.prompt_ids) + len(answer.output_ids)
        self._counts = counts
        self._attached = attached

    async def run(self) -> None:
        """Generate until the answer ends; everything is freed on the workers whatever happens.

        Raises nothing but cancellation: an error goes to the outbox's reader, after the tokens before it.
        """
        failure: Exception | None = None
        try:
            while self._answer.finish is None:
                try:
                    await self._advance()
                except (SequenceLostError, ResourceExhaustedError) as error:  # the latter: other routers were first
                    await self._reopen(error)
        except Exception as caught:
            failure = caught
        finally:
            self._speculator.close()
            self._close_session()
            self._counts.num_failed_drafts = self._speculator.num_failed + self._attached.num_failed
            self._counts.draft_workers += self._speculator.worker_ids
            self._outbox.close(failure)

    async def _advance(self) -> None:
        """One round with a draft, or one plain step; whichever suits."""
        self._began_ns = time.perf_counter_ns()
        self._step_began_s = time.perf_counter()
        if self._session is None:
            self._worker = self._failover.place(self._worker)  # others were opened since this request was admitted
            self._session = self._worker.open(self._request, self._answer.output_ids)
            self._note_worker()
            self._step_began_s = None  # its prefill is in it
        if self._worker.is_draining and self._failover.has_other(self._worker):
            raise SequenceLostError(f"verify worker {self._worker.link.address} drains")
        if self._session.is_attached:
            await self._attached_round(self._session)
        elif self._length >= self._session.granted_length and self._answer.room > 1 and self._speculator.is_available:
            await self._round(self._session)
        else:
            await self._plain_step(self._session)

    async def _round(self, session: VerifySession) -> None:
        """The round: draft, verify, commit."""
        started_ns = time.perf_counter_ns()
        draft = await self._draft()
        verdict = await self._verify(session, draft)
        if draft is not NO_DRAFT:
            self._counts.num_draft_forwards += draft.num_forwards
            self._counts.add_round(
                time.perf_counter_ns() - started_ns,
                draft.queue_ns,
                draft.forward_ns,
                verdict.queue_ns + verdict.forward_ns,
            )
        await self._commit(draft, verdict)

    async def _attached_round(self, session: VerifySession) -> None:
        """A round that the verify worker does alone, with a drafter of its own."""
        self._attached.renew(session, self._length, self._answer.room)
        try:
            verdict = await session.next_plain(self._length)
        except InvalidArgumentError as error:
            if not error.field.startswith("drafter."):
                raise
            raise of_request(error, self._request) from error
        draft = attached_draft(verdict)
        if draft is not None:
            round_ns = time.perf_counter_ns() - self._began_ns
            self._counts.num_draft_forwards += draft.num_forwards
            self._counts.add_round(round_ns, 0, draft.forward_ns, verdict.queue_ns + verdict.forward_ns)
        await self._commit(draft or NO_DRAFT, verdict)

    async def _draft(self) -> Draft:
        # The modes that look at draft distributions take chains only.
        takes_trees = self._request.mode == VERIFICATION_MODE_COUPLED and self._worker.hello.supports_trees
        room = self._answer.room - 1
        room = min(room, self._worker.hello.max_draft_tokens or room)
        return await self._speculator.draft(self._answer.output_ids, room, takes_trees, self._worker.link.load)

    async def _verify(self, session: VerifySession, draft: Draft) -> Verdict:
        if draft.ids:
            self._pause.drafted()
            return await session.verify(self._length, draft)
        num_steps = 1
        if draft is not NO_DRAFT and not self._request.num_draft_tokens:  # nothing pays here, nor soon
            num_steps = min(self._pause.empty(), self._answer.room)
        session.grant(self._length, num_steps)
        return await session.next_plain(self._length)

    async def _commit(self, draft: Draft | AttachedDraft, verdict: Verdict) -> None:
        """Append what the target decided, tell the drafter and the client."""
        path = verdict.path if draft.parents else range(verdict.num_accepted)
        accepted, sources = draft.along(path)
        emitted = [*accepted, verdict.next_id]
        kept = self._answer.append(emitted)
        self._counts.add_forward(kept.num_tokens, verdict.queue_ns, verdict.forward_ns)
        if draft.num_tokens:  # the answer may have ended inside the accepted prefix
            self._counts.add_draft(draft.num_tokens, draft.depth, min(len(path), kept.num_tokens))
        if not self._counts.first_token_ns:
            self._counts.first_token_ns = time.perf_counter_ns()
            self._counts.num_cached_tokens = min(verdict.cached_tokens, len(self._request.prompt_ids))
            self._step_began_s = None  # the prompt's prefill is in it
        if self._session is not None and self._session.is_attached:
            self._attached.record(verdict, len(emitted), self._step_began_s)
        elif self._answer.finish is None:
            self._speculator.commit(self._length, emitted, self._step_began_s)
        self._length += kept.num_tokens
        self._emit(draft, path, sources, emitted[: kept.num_tokens], verdict, kept)
        if self._outbox.is_full:
            await self._wait_for_client()

    async def _wait_for_client(self) -> None:
        """Until it has read; a client that takes long leaves its pages to others, and its sequence is opened again."""
        try:
            async with asyncio.timeout(_BEHIND_S):
                await self._outbox.room()
        except TimeoutError:
            self._speculator.close()
            self._close_session()
            await self._outbox.room()

    async def _plain_step(self, session: VerifySession) -> None:
        """One token decoded by the verify worker alone; the grant is renewed at half while no draft is wanted."""
        num_left = session.granted_length - self._length
        if num_left <= 0 or (num_left <= NUM_GRANTED_STEPS // 2 and not self._speculator.is_available):
            num_steps = min(NUM_GRANTED_STEPS, self._answer.room)
            if num_steps > num_left:
                session.grant(self._length, num_steps)
        verdict = await session.next_plain(self._length)
        await self._commit(NO_DRAFT, verdict)

    def _emit(
        self,
        draft: Draft | AttachedDraft,
        path: Sequence[int],
        sources: Sequence[str],
        ids: Sequence[int],
        verdict: Verdict,
        kept: Kept,
    ) -> None:
        origins = [TOKEN_ORIGIN_ACCEPTED] * len(path)
        if not draft.num_tokens:
            origins.append(TOKEN_ORIGIN_PLAIN)
        elif draft.is_exhausted_by(path):
            origins.append(TOKEN_ORIGIN_BONUS)
        else:
            origins.append(TOKEN_ORIGIN_RECOVERED)
        origins = origins[: len(ids)]
        sources = [*sources[: len(ids)], *[""] * (len(ids) - len(sources))]
        logprobs = verdict.logprobs[: len(ids)] if verdict.logprobs else ()
        times = (
            self._times(draft, min(len(path), len(ids)), verdict, len(ids)) if self._request.reports_rounds else None
        )
        self._outbox.put(ids, origins, sources, logprobs, kept.text, kept.num_chars, times)

    def _times(self, draft: Draft | AttachedDraft, num_accepted: int, verdict: Verdict, num_tokens: int) -> RoundTimes:
        return RoundTimes(
            num_tokens=num_tokens,
            num_draft_tokens=draft.num_tokens,
            num_accepted_tokens=num_accepted,
            begin_ns=self._began_ns - self._request.received_ns,
            duration_ns=time.perf_counter_ns() - self._began_ns,
            draft_queue_ns=draft.queue_ns,
            draft_forward_ns=draft.forward_ns,
            verify_queue_ns=verdict.queue_ns,
            verify_forward_ns=verdict.forward_ns,
        )

    async def _reopen(self, why: SequenceLostError | ResourceExhaustedError) -> None:
        """Continue on another worker, or on the same one after it came back or has room, from the committed ids."""
        _log.warning("request %s is re-opened: %s", self._request.request_id, why)
        self._close_session()
        self._step_began_s = None
        self._began_ns = time.perf_counter_ns()
        self._counts.num_failovers += isinstance(why, SequenceLostError)
        self._worker, self._session, verdict = await self._failover.reopen(
            self._request, self._answer.output_ids, self._identity, self._worker, why
        )
        self._note_worker()
        await self._commit(NO_DRAFT, verdict)

    def _note_worker(self) -> None:
        if (worker_id := self._worker.id) not in self._counts.verify_workers:
            self._counts.verify_workers.append(worker_id)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
