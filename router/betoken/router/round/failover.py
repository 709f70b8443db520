"""Brings a sequence back to life after its verify worker was lost: elsewhere, or on the same worker once it is back.
A sequence whose worker is full waits in the same queue.

Token ids are all that is needed; no KV crosses the wire. Bounded in number at once, and in time. Time counts while no
sequence can be re-opened, since the sequences of a dead worker may wait for each other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncio_pool import AioPool

from betoken.common.errors import InternalError, ResourceExhaustedError, UnavailableError
from betoken.router.request.generation import GenerationRequest, waiting_s
from betoken.router.request.worker_identity import WorkerIdentity
from betoken.router.workers.bounded import run_bounded
from betoken.router.workers.verify_pool import VerifyPool
from betoken.router.workers.verify_requests import Grant
from betoken.router.workers.verify_session import SequenceLostError, VerifySession
from betoken.router.workers.verify_worker import VerifyWorker
from betoken.v1.verify_pb2 import PromptLogprobs, VerificationResult

_RETRY_PAUSE_S = 0.05
_MAX_RETRY_PAUSE_S = 1.0
_MAX_FAULTS = 3
"""Attempts in a row that fail by a worker's own fault; then it is the sequence that it cannot serve."""
_SILENCE_SHARE = 0.5
"""Part of the allowed time after which a worker without progress is left for another worker, even a later one."""
_PROGRESS_SHARE = 0.05
"""Part of the allowed time after which progress counts again. Workers report it many times per second."""


class _AttemptFailedError(Exception):
    """A worker could not take the sequence up; another one, or the same one later, may."""

    def __init__(self, worker: VerifyWorker, reason: Exception) -> None:
        super().__init__(str(reason))
        self.worker = worker
        self.reason = reason


class Committed(NamedTuple):
    """Tokens that the client of a sequence has, or is about to receive."""

    ids: Sequence[int]
    """Output ids."""
    num_received_logprobs: int = 0
    """Entries of the prompt's logprobs."""


class Reopened(NamedTuple):
    """A sequence that goes on."""

    worker: VerifyWorker
    session: VerifySession
    answer: VerificationResult | PromptLogprobs
    """Verification result of its first decode step there, or its first prompt logprobs."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A sequence that waits to be re-opened."""

    limit: asyncio.Timeout
    """Its deadline, on the event loop's clock."""
    suspect_until_s: float | None = None
    """Deadline by which it may be tried, same clock, once an attempt was lost with it; None before that."""

    @property
    def is_suspect(self) -> bool:
        """Whether a worker was lost with it, perhaps because of it."""
        return self.suspect_until_s is not None

    @property
    def ends_s(self) -> float:
        """Deadline, on the event loop's clock."""
        return self.limit.when() or 0.0

    def extend(self, until_s: float) -> None:
        """Move its deadline, unless that is over."""
        if not self.limit.expired():
            self.limit.reschedule(until_s)

    def suspect(self, until_s: float) -> None:
        """It was lost again: the first such deadline stays, whatever sign of work came since."""
        if self.suspect_until_s is None:
            self.suspect_until_s = until_s
        self.extend(self.suspect_until_s)


class Failover:
    """Re-opens sequences; shared by all requests."""

    def __init__(self, verify: VerifyPool, reopens: AioPool, timeout_s: float) -> None:
        """`reopens` bounds how many sequences are re-opened at once, `timeout_s` how long one waits while none is."""
        self._verify = verify
        self._reopens = reopens
        self._timeout_s = timeout_s
        self._waiting: set[_Waiting] = set()
        """Sequences waiting to be reopened. Progress of any worker extends the deadlines of unsuspected ones."""
        self._progressed_s = -math.inf

    def has_other(self, worker: VerifyWorker) -> bool:
        """Whether another responsive worker produces the same tokens and has room beyond its waiting sequences."""
        other = self._verify.least_loaded(worker.identity, avoid=worker)
        if other is None or other.is_silent:
            return False
        num_waiting = sum(not each.is_suspect for each in self._waiting)
        return other.load_factor + num_waiting / max(1, other.hello.max_sequences) < 1

    def place(self, worker: VerifyWorker) -> VerifyWorker:
        """The worker with most room among workers that produce the same tokens as `worker`; itself if none is ready."""
        return self._verify.least_loaded(worker.identity) or worker

    async def reopen(
        self,
        request: GenerationRequest,
        committed: Committed,
        identity: WorkerIdentity,
        lost: VerifyWorker,
        why: SequenceLostError | ResourceExhaustedError,
    ) -> Reopened:
        """Re-open the sequence on a worker of the same identity.

        Raises:
            UnavailableError: for the time allowed, no such worker could go on with this sequence or another one.
            ResourceExhaustedError: the same, as other routers keep them full; or the sequence is too large for a link.
            InternalError: workers failed at it, again and again.
            BetokenError: a worker refused the sequence for good.
        """
        pause_s, num_faults = 0.0, 0
        reason: Exception = why
        limit_s = waiting_s(self._timeout_s, request.left_s)
        waiting = _Waiting(asyncio.timeout(limit_s))
        self._waiting.add(waiting)
        try:
            async with waiting.limit:
                while True:
                    try:
                        await asyncio.sleep(pause_s)
                        attempt = self._try(request, committed, identity, lost, waiting)
                        opened = await run_bounded(self._reopens, attempt, discard=lambda late: late.session.close())
                        self._progressed()
                        return opened
                    except _AttemptFailedError as failed:
                        lost, reason = failed.worker, failed.reason  # the next attempt goes elsewhere if it can
                        num_faults = num_faults + 1 if isinstance(reason.__cause__, InternalError) else 0
                        if num_faults == _MAX_FAULTS and reason.__cause__ is not None:
                            raise reason.__cause__ from None
                        if isinstance(reason, SequenceLostError):
                            waiting.suspect(asyncio.get_running_loop().time() + self._timeout_s)
                        pause_s = min(_MAX_RETRY_PAUSE_S, max(_RETRY_PAUSE_S, pause_s * 2))
        except TimeoutError:
            if isinstance(reason, ResourceExhaustedError):
                raise reason from None
            raise UnavailableError(
                f"the verify worker was lost and none could go on within {limit_s:.3g} s", places=str(reason)
            ) from reason
        finally:
            self._waiting.discard(waiting)

    def _progressed(self) -> None:
        """A sequence was re-opened, or is about to be: the others' turns will come, so their patience begins anew."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._progressed_s + _PROGRESS_SHARE * self._timeout_s:
            return
        self._progressed_s = now_s
        for waiting in self._waiting:
            if not waiting.is_suspect:
                waiting.extend(now_s + self._timeout_s)

    def _pending(self, waiting: _Waiting) -> None:
        """A worker processes the sequence, or will. Once reopened, waiting sequences gain nothing from it."""
        if waiting not in self._waiting:
            return
        self._progressed()
        if waiting.is_suspect:
            until_s = asyncio.get_running_loop().time() + self._timeout_s
            if until_s - waiting.ends_s >= _PROGRESS_SHARE * self._timeout_s:
                waiting.extend(until_s)

    async def _try(
        self,
        request: GenerationRequest,
        committed: Committed,
        identity: WorkerIdentity,
        lost: VerifyWorker,
        waiting: _Waiting,
    ) -> Reopened:
        worker = self._verify.least_loaded(identity, avoid=lost)
        if worker is None:
            left_s = waiting.ends_s - asyncio.get_running_loop().time()
            worker = await self._verify.wait_ready(max(0.0, left_s), identity)
        try:
            session = worker.open(request, *committed, on_pending=lambda: self._pending(waiting))
        except SequenceLostError as error:
            raise _AttemptFailedError(worker, error) from error
        try:
            base_length = len(request.prompt_ids) + len(committed.ids)
            patience_s = _SILENCE_SHARE * self._timeout_s

            def is_enough(silent_s: float) -> bool:
                return silent_s >= patience_s and self._verify.least_loaded(identity, worker) is not None

            if session.has_pending_prompt_logprobs:
                return Reopened(worker, session, await session.next_of_prompt(is_enough))
            session.grant(Grant(base_length, 1))
            return Reopened(worker, session, await session.next_granted(base_length, is_enough))
        except (SequenceLostError, ResourceExhaustedError) as error:
            session.close()
            raise _AttemptFailedError(worker, error) from error
        except BaseException:
            session.close()
            raise
