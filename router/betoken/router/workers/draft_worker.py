"""One draft worker: opens sequences there, hands out what comes back, and probes it while its circuit is open.

Knows its link and its sessions; knows nothing of other workers, verification results or text.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

from asyncio_pool import AioPool

from betoken.common.economy.terms import AskingTime, PriceExploration
from betoken.common.errors import BetokenError, ResourceExhaustedError, UnavailableError
from betoken.router.request.generation import GenerationRequest
from betoken.router.workers.bounded import run_bounded
from betoken.router.workers.circuit_breaker import CircuitBreaker
from betoken.router.workers.draft_session import (
    DraftFailedError,
    DraftSession,
    DraftUnavailableError,
    DraftWorkerLostError,
)
from betoken.router.workers.drafter_record import DrafterRecord
from betoken.router.workers.worker import Worker, WorkerOptions
from betoken.rpc.link import DraftLink, LinkCallbacks
from betoken.rpc.sampling import NEUTRAL, resolve_sampling
from betoken.rpc.validation import validate_frame
from betoken.v1.draft_pb2 import Commit, DraftLinkResponse, DraftRequest
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    DrafterChoice,
    SamplingParams,
    WorkerHello,
)

_log = logging.getLogger(__name__)
_PROBE_IDS = (0,)
_PROBE_MAX_LENGTH = 8
_PROBE_SAMPLING = resolve_sampling(
    SamplingParams(temperature=0.0, seed=0, max_new_tokens=_PROBE_MAX_LENGTH - len(_PROBE_IDS), ignore_eos=True),
    NEUTRAL,
    seed=0,
    prompt_length=len(_PROBE_IDS),
    max_context=_PROBE_MAX_LENGTH,
    vocab_size=1,
)


class DraftWorker(Worker[DraftSession]):
    """One draft worker and the sequences this router has on it."""

    def __init__(
        self,
        address: str,
        options: WorkerOptions,
        breaker: CircuitBreaker,
        check_hello: Callable[[WorkerHello], None],
        on_up: Callable[[], None],
    ) -> None:
        """`check_hello` raises for a worker that does not fit; `on_up` follows when it was met."""
        callbacks = LinkCallbacks(self._take, self._up, self._down, check_hello)
        super().__init__(DraftLink(address, callbacks, options.link), options)
        self.breaker = breaker
        self.asking = AskingTime()
        self.trials = PriceExploration()
        self._records: dict[str, DrafterRecord] = {}
        self.is_silent = False
        """Whether a draft was missed and the worker has sent no frame since the request; it is then not asked."""
        self._last_frame_s = -math.inf
        """Time of the last frame, `time.monotonic`."""
        self._on_up = on_up
        self._is_up = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sequences."""
        return super().is_ready and self.breaker.is_closed

    @property
    def has_room(self) -> bool:
        """Whether it takes another sequence, by this router's own count. A worker's report of its load may be late, and
        a request that wrongly goes without drafts would be slower, or in some modes get other tokens."""
        return len(self._sessions) < max(1, self.hello.max_sequences)

    def open(self, request: GenerationRequest, committed_ids: Sequence[int], drafter: DrafterChoice) -> DraftSession:
        """Open the request's sequence here, for one of the drafters it hosts (name empty: its default).

        Raises:
            DraftUnavailableError: the worker has just gone.
        """
        sequence_id = self._options.sequence_ids.next()
        has_probs = request.mode == VERIFICATION_MODE_REJECTION
        session = DraftSession(sequence_id, self, self._options.patience, has_probs)
        try:
            name = drafter.name or next(iter(self.hello.drafters), "")
            is_predicting = name in self.hello.predicting_drafters
            entry = request.open_entry(sequence_id, committed_ids, drafter, is_predicting=is_predicting)
            self.link.send(opens=[entry])
        except UnavailableError as error:
            raise DraftUnavailableError(str(error)) from error
        self._sessions[sequence_id] = session
        return session

    def record_of(self, drafter: str) -> DrafterRecord:
        """The evidence about one of its drafters; empty = its default."""
        name = drafter or next(iter(self.hello.drafters), "")
        if name not in self._records:
            self._records[name] = DrafterRecord(f"drafter {name} at {self.link.address}")
        return self._records[name]

    async def keep_probed(self, pool: AioPool, timeout_s: float) -> None:
        """Probe the worker whenever its circuit is open and it is connected, until cancelled."""
        while True:
            await self.breaker.wait_open()
            await self.breaker.wait_pause()
            await self._is_up.wait()
            self.breaker.record_probe(await run_bounded(pool, self._probe(timeout_s)))

    async def _probe(self, timeout_s: float) -> bool:
        """Probe the worker: whether a tiny sequence gets a draft in time, or the worker reports that it is full."""
        request = GenerationRequest(
            request_id="probe",
            prompt_ids=_PROBE_IDS,
            sampling=_PROBE_SAMPLING,
            mode=VERIFICATION_MODE_COUPLED,
            eos_token_ids=(),
            max_length=_PROBE_MAX_LENGTH,
        )
        session: DraftSession | None = None
        try:
            session = self.open(request, (), DrafterChoice())
            await session.draft(len(_PROBE_IDS), _PROBE_IDS[-1], 1, self.hello.vocab_size or 1, timeout_s)
            return True
        except ResourceExhaustedError:  # it works; to wait ever longer would leave each place to routers already in
            return True
        except (DraftFailedError, BetokenError) as error:
            _log.warning("draft worker %s failed its probe: %s", self.link.address, error)
            return False
        finally:
            if session is not None:
                session.close()

    def ask(self, commits: Sequence[Commit], request: DraftRequest) -> None:
        """Send what was decided and the request for a draft.

        Raises:
            UnavailableError: the worker has just gone.
        """
        if request.sequence_id in self._sessions:  # otherwise the session has its error already
            self.link.send(commits=commits, requests=(request,))

    def missed_draft(self, asked_s: float, *, is_pending: bool) -> None:
        """Record that a request sent at `asked_s` (`time.monotonic`) was not answered in time.

        `is_pending`: whether the worker has reported this request as waiting or in progress.
        """
        if self._last_frame_s < asked_s:
            if not self.is_silent:
                _log.warning("draft worker %s gives no sign of work: it is not asked until it does", self.link.address)
            self.is_silent = True
            self.breaker.trip()
        elif not is_pending:
            self.breaker.record_failure()

    def _take(self, frame: DraftLinkResponse) -> None:
        self._last_frame_s = time.monotonic()
        if self.is_silent:
            self.is_silent = False
            self.breaker.record_probe(succeeded=True)
            _log.warning("draft worker %s works again", self.link.address)
        validate_frame(frame.blocks, frame.errors, frame.pending_ids)
        self._deliver(frame.blocks)
        self._note_pending(frame.pending_ids)
        self._take_errors(frame.errors, lambda error: error)

    def _up(
        self,
    ) -> None:
        self.is_silent = False
        self.breaker.reset()
        self._is_up.set()
        self._on_up()

    def _down(self, why: BetokenError) -> None:
        self._is_up.clear()
        self.breaker.reset()
        self._lose_sessions(DraftWorkerLostError(f"draft worker {self.link.address} went away: {why}"))
