"""One request from its first block to its last token: rounds of draft, verify, commit; plain steps; failover.

Reads like the algorithm; knows sessions, not links, and emits rounds, not messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from betoken.common.economy.terms import EmptyDraftPause
from betoken.common.errors import InvalidArgumentError, ResourceExhaustedError
from betoken.router.round.decided_round import DecidedRound
from betoken.router.round.draft_errors import of_request
from betoken.router.round.events import PromptLogprobsPart
from betoken.router.round.failover import Committed, Failover
from betoken.router.round.generation import Placed
from betoken.router.round.request_sources import RequestSources
from betoken.router.round.token_buffer import TokenBuffer
from betoken.router.workers.attached_draft import attached_draft
from betoken.router.workers.draft import NO_DRAFT, Draft
from betoken.router.workers.verify_requests import Grant, Verification
from betoken.router.workers.verify_session import SequenceLostError, VerifySession
from betoken.v1.types_pb2 import VERIFICATION_MODE_COUPLED
from betoken.v1.verify_pb2 import PromptLogprobs

_log = logging.getLogger(__name__)

NUM_GRANTED_STEPS = 16
"""Plain steps granted at once; renewed when half of them are done."""
_BEHIND_S = 1.0
"""How long a client's answer may be full before its sequence is closed on the workers, till it has read."""


@dataclass(slots=True)
class _Step:
    """A round, a plain step or a re-opening under way."""

    began_ns: int = field(default_factory=time.perf_counter_ns)
    """Start, `time.perf_counter_ns()`."""
    tells_of_drafts: bool = True
    """Whether its time may be used to judge drafts: neither prefill nor failover is in it."""

    @property
    def began_s(self) -> float | None:
        """Start for those who judge drafts (`time.perf_counter`); None = its time says nothing of them."""
        return self.began_ns / 1e9 if self.tells_of_drafts else None


class RoundLoop:
    """The state of one admitted request."""

    def __init__(
        self,
        placed: Placed,
        sources: RequestSources,
        failover: Failover,
        buffer: TokenBuffer,
    ) -> None:
        request, answer, counts = placed.generation.request, placed.generation.answer, placed.generation.counts
        self._request = request
        self._opened_as = request
        """The request as verify workers see it: without a drafter that the last one refused."""
        self._is_taken = request.has_begun
        """Whether a worker has taken it: a drafter that another one refuses then costs drafts."""
        self._answer = answer
        self._worker = placed.worker
        self._sources = sources
        self._failover = failover
        self._buffer = buffer
        self._identity = placed.worker.identity
        self._session: VerifySession | None = None
        self._pause = EmptyDraftPause()
        self._step = _Step()
        self._length = len(request.prompt_ids) + len(answer.output_ids)
        self._num_received_logprobs = request.num_received_logprobs
        self._counts = counts

    async def run(self) -> None:
        """Generate until the answer ends; everything is freed on the workers whatever happens.

        Raises nothing but cancellation: an error goes to the buffer's reader, after the tokens before it.
        """
        failure: Exception | None = None
        try:
            while self._is_prompt_owed or self._answer.finish is None:
                try:
                    await self._advance()
                except (SequenceLostError, ResourceExhaustedError) as error:  # the latter: other routers were first
                    await self._reopen(error)
                except InvalidArgumentError as error:
                    self._refused(error)
        except Exception as caught:
            failure = caught
        finally:
            self._note_policy()
            self._sources.end()
            self._close_session()
            self._counts.end(self._sources.failures)
            self._counts.draft_workers += self._sources.worker_ids
            self._counts.stats.is_synthetic |= self._sources.is_synthetic
            self._buffer.close(failure)

    async def _advance(self) -> None:
        """One round with a draft, or one step under a grant; whichever suits."""
        self._step = _Step()
        if not self._is_prompt_owed and self._answer.end_without_room():
            return
        session = self._session or self._open()
        if self._worker.is_draining and self._failover.has_other(self._worker):
            raise SequenceLostError(f"verify worker {self._worker.link.address} drains")
        if session.has_pending_prompt_logprobs:
            await self._take_prompt(await session.next_of_prompt())
            return
        self._sources.update(self._length)
        is_granted = self._sources.is_attached or self._length < session.granted.end
        if not is_granted and self._answer.room > 1 and self._sources.speculator.is_available:
            await self._round(session)
        else:
            await self._granted_step(session)

    @property
    def _is_prompt_owed(self) -> bool:
        """Whether the client waits for logprobs of its prompt."""
        return self._num_received_logprobs < self._request.num_prompt_logprobs

    async def _take_prompt(self, part: PromptLogprobs) -> None:
        """Tell the client logprobs of its prompt."""
        self._is_taken = True
        self._num_received_logprobs += len(part.logprobs)
        self._buffer.put_prompt(PromptLogprobsPart(part.first_position, part.logprobs))
        if self._buffer.is_full:
            await self._wait_for_client()

    def _open(self) -> VerifySession:
        self._worker = self._failover.place(self._worker)  # others were opened since this request was admitted
        self._session = session = self._worker.open(
            self._opened_as, self._answer.output_ids, self._num_received_logprobs
        )
        self._sources.opened(self._worker, session, self._length)
        self._note_worker()
        self._step.tells_of_drafts = False  # its prefill is in it
        return session

    async def _round(self, session: VerifySession) -> None:
        """The round: draft, verify, commit. Where the draft is empty, a plain step or a few."""
        asked_ns = time.perf_counter_ns()
        draft = await self._draft()
        if draft.ids:
            self._pause.drafted()
            result = await session.verify(Verification(self._length, draft))
            self._sources.speculator.length.verified(draft, result.num_accepted)
        else:
            session.grant(Grant(self._length, self._num_steps_after(draft)))
            result = await session.next_granted(self._length)
        if draft is not NO_DRAFT:
            verify_ns = result.queue_ns + result.forward_ns
            round_ns = time.perf_counter_ns() - asked_ns
            self._counts.add_round(round_ns, draft.queue_ns, draft.forward_ns, verify_ns, draft.num_forwards)
            self._counts.add_ahead(draft.num_ahead_tokens, draft.num_ahead_ids)
        await self._commit(DecidedRound.of(draft, result))

    async def _draft(self) -> Draft:
        # The modes that look at draft distributions take chains only.
        takes_trees = self._request.mode == VERIFICATION_MODE_COUPLED and self._worker.hello.supports_trees
        room = self._answer.room - 1
        room = min(room, self._worker.hello.max_draft_tokens or room)
        worker = self._worker
        return await self._sources.speculator.draft(
            self._answer.output_ids, room, takes_trees, worker.link.load, worker.forward_s.mean, worker.forward_times
        )

    def _num_steps_after(self, draft: Draft) -> int:
        """Plain steps after an empty draft: ever more where nothing pays, nor will soon."""
        if draft is NO_DRAFT or self._request.num_draft_tokens:
            return 1
        return min(self._pause.empty(), self._answer.room)

    async def _granted_step(self, session: VerifySession) -> None:
        """A step that the verify worker does alone: a round with an attached drafter, or a decode step."""
        if self._sources.is_attached:
            self._sources.renew(session, self._length, self._answer.room)
        else:
            self._grant_decode_steps(session)
        result = await session.next_granted(self._length)
        draft = attached_draft(result)
        if draft is not None:
            round_ns = time.perf_counter_ns() - self._step.began_ns
            verify_ns = result.queue_ns + result.forward_ns
            self._counts.add_round(round_ns, 0, draft.forward_ns, verify_ns, draft.num_forwards)
        await self._commit(DecidedRound.of(draft or NO_DRAFT, result))

    def _grant_decode_steps(self, session: VerifySession) -> None:
        """Grant decode steps, or more of them at half of the grant while no draft is wanted."""
        num_left = session.granted.end - self._length
        if num_left <= 0 or (num_left <= NUM_GRANTED_STEPS // 2 and not self._sources.speculator.is_available):
            num_steps = min(NUM_GRANTED_STEPS, self._answer.room)
            if num_steps > num_left:
                session.grant(Grant(self._length, num_steps))

    async def _commit(self, decided: DecidedRound) -> None:
        """Append what the target decided, tell the drafter and the client."""
        draft, result, self._is_taken = decided.draft, decided.result, True
        kept = self._answer.append(decided.ids)
        self._counts.add_forward(kept.num_tokens, result.queue_ns, result.forward_ns)
        if draft.num_tokens:
            self._counts.add_draft(draft.num_tokens, draft.depth, decided.num_accepted(kept.num_tokens))
            self._counts.add_predicted(draft.num_predicted_tokens, decided.num_predicted(kept.num_tokens))
        if not self._counts.first_token_ns:
            self._counts.first_token_ns = time.perf_counter_ns()
            self._counts.num_cached_tokens = min(result.cached_tokens, len(self._request.prompt_ids))
            self._step.tells_of_drafts = False  # the prompt's prefill is in it
        if self._step.tells_of_drafts:
            elapsed_ns = time.perf_counter_ns() - self._step.began_ns
            self._worker.forward_s.add(min(result.forward_ns, elapsed_ns) * 1e-9)
        if self._sources.is_attached or self._answer.finish is None:
            times = self._worker.forward_times
            self._sources.commit(self._length, decided.ids, result, self._step.began_s, times)
        self._length += kept.num_tokens
        round_times = None
        if self._request.reports_rounds:
            began_ns = self._step.began_ns
            duration_ns = time.perf_counter_ns() - began_ns
            round_times = decided.times(kept.num_tokens, began_ns - self._request.received_ns, duration_ns)
        self._buffer.put(decided.emitted(kept, round_times))
        if self._buffer.is_full:
            await self._wait_for_client()

    async def _wait_for_client(self) -> None:
        """Until it has read; a client that takes long leaves its pages to others, and its sequence is opened again."""
        try:
            async with asyncio.timeout(_BEHIND_S):
                await self._buffer.room()
        except TimeoutError:
            self._sources.close()
            self._close_session()
            await self._buffer.room()

    def _refused(self, error: InvalidArgumentError) -> None:
        """A verify worker refuses the request. One that another worker took goes on where it is but for the drafter
        attached there: it may lack an adapter, or not be what the router was told."""
        if self._opened_as.drafter is None or not error.field.startswith("drafter."):
            raise error
        if not self._is_taken:
            raise of_request(error, self._request) from error
        _log.warning("request %s goes on without the attached drafter: %s", self._request.request_id, error)
        self._sources.attached.failures["rejected"] += 1
        self._sources.forgive()
        self._opened_as = replace(self._request, drafter=None)
        self._close_session()

    async def _reopen(self, why: SequenceLostError | ResourceExhaustedError) -> None:
        """Continue on another worker, or on the same one after it came back or has room, from the committed ids."""
        _log.warning("request %s is re-opened: %s", self._request.request_id, why)
        self._close_session()
        self._step = _Step(tells_of_drafts=False)
        is_lost = isinstance(why, SequenceLostError)
        self._counts.stats.num_failovers += is_lost
        self._is_taken |= is_lost
        committed = Committed(self._answer.output_ids, self._num_received_logprobs)
        self._opened_as = self._request
        try:
            opened = await self._failover.reopen(self._request, committed, self._identity, self._worker, why)
        except InvalidArgumentError as error:
            self._refused(error)
            opened = await self._failover.reopen(self._opened_as, committed, self._identity, self._worker, why)
        self._worker, self._session = opened.worker, opened.session
        self._sources.opened(opened.worker, opened.session, self._length)
        self._note_worker()
        if isinstance(opened.answer, PromptLogprobs):
            await self._take_prompt(opened.answer)
        else:
            await self._commit(DecidedRound.of(NO_DRAFT, opened.answer))

    def _note_policy(self) -> None:
        """Record why the request speculates at its end, or does not."""
        if self._request.drafter is not None:
            self._counts.drafter = self._sources.drafter
            self._counts.stats.policy.CopyFrom(self._sources.policy)

    def _note_worker(self) -> None:
        self._counts.stats.is_synthetic |= self._worker.hello.is_synthetic
        if (worker_id := self._worker.id) not in self._counts.verify_workers:
            self._counts.verify_workers.append(worker_id)

    def _close_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
