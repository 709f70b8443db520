"""The draft workers: which host what, which work, and which is least loaded.

A worker gets sequences only while its circuit is closed. The circuit closes only after a probe of the router's own, so
that no client waits for a hanging worker. Knows nothing of verdicts or text.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from asyncio_pool import AioPool

from betoken.common.errors import BetokenError, ResourceExhaustedError, UnavailableError
from betoken.router.request import GenerationRequest, SequenceIds
from betoken.router.workers.bounded import run_bounded
from betoken.router.workers.circuit_breaker import CircuitBreaker
from betoken.router.workers.draft_session import DraftFailedError, DraftSession, DraftWorkerLostError
from betoken.router.workers.mailbox import Patience
from betoken.router.workers.worker import Worker
from betoken.rpc.link import DraftLink, LinkCallbacks, LinkOptions, LinkState
from betoken.rpc.validation import validate_frame
from betoken.v1.draft_pb2 import Commit, DraftLinkResponse, DraftRequest
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    DrafterChoice,
    SamplingParams,
    SourceInfo,
    WorkerHello,
)

_log = logging.getLogger(__name__)
_PROBE_IDS = (0,)
_PROBE_MAX_LENGTH = 8
_ASKING_SHARE = 0.05  # of the last draft in a worker's mean
_PROBE_SAMPLING = SamplingParams(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    seed=0,
    max_new_tokens=_PROBE_MAX_LENGTH - len(_PROBE_IDS),
    min_new_tokens=0,
    ignore_eos=True,
)


class DraftWorker(Worker[DraftSession]):
    """One draft worker and the sequences this router has on it."""

    def __init__(self, address: str, pool: DraftPool, breaker: CircuitBreaker, options: LinkOptions) -> None:
        callbacks = LinkCallbacks(self._take, self._up, self._down, pool.check_hello)
        super().__init__(DraftLink(address, callbacks, options), f"draft worker {address}")
        self.breaker = breaker
        self.asking_s = 0.0
        """What asking for a draft takes, drafting excluded; a decayed mean."""
        self._pool = pool
        self._is_up = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        """Whether it takes new sequences."""
        return self.link.state is LinkState.READY and self.breaker.is_closed

    @property
    def drafters(self) -> Sequence[str]:
        """Names of the drafters it hosts, its default first; those of its last handshake while it is away."""
        return tuple(self.link.hello.drafters) if self.link.hello is not None else ()

    @property
    def sources(self) -> Sequence[SourceInfo]:
        """The sources of its draft tokens; those of its last handshake while it is away."""
        return self.link.hello.sources if self.link.hello is not None else ()

    @property
    def has_room(self) -> bool:
        """Whether it takes another sequence, by this router's own count. A worker's report of its load may be late, and
        a request that wrongly goes without drafts would be slower, or in some modes get other tokens."""
        return len(self._sessions) < max(1, self.hello.max_sequences)

    def open(self, request: GenerationRequest, committed_ids: Sequence[int], drafter: DrafterChoice) -> DraftSession:
        """Open the request's sequence here, for one of the drafters it hosts (name empty: its default).

        Raises:
            DraftFailedError: the worker has just gone.
        """
        sequence_id = self._pool.sequence_ids.next()
        has_probs = request.mode == VERIFICATION_MODE_REJECTION
        session = DraftSession(sequence_id, self._pool.patience, self._send, self._close, has_probs)
        try:
            self.link.send(opens=[request.open_entry(sequence_id, committed_ids, drafter)])
        except UnavailableError as error:
            raise DraftFailedError(str(error)) from error
        self._sessions[sequence_id] = session
        return session

    def record_asking(self, seconds: float) -> None:
        """A draft came `seconds` beyond its drafting time."""
        self.asking_s += _ASKING_SHARE * (seconds - self.asking_s)

    async def keep_probed(self, pool: AioPool, timeout_s: float) -> None:
        """Probe the worker whenever its circuit is open and it is connected, until cancelled."""
        while True:
            await self.breaker.wait_open()
            await self.breaker.wait_pause()
            await self._is_up.wait()
            self.breaker.record_probe(await run_bounded(pool, self._probe(timeout_s)))

    async def _probe(self, timeout_s: float) -> bool:
        """Whether a tiny sequence of our own gets a draft in time, or is told that others fill the worker."""
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
            await session.draft(len(_PROBE_IDS), 1, self.hello.vocab_size or 1, timeout_s)
            return True
        except ResourceExhaustedError:  # it works; to wait ever longer would leave each place to routers already in
            return True
        except (DraftFailedError, BetokenError) as error:
            _log.warning("draft worker %s failed its probe: %s", self.link.address, error)
            return False
        finally:
            if session is not None:
                session.close()

    def _send(self, commits: Sequence[Commit], request: DraftRequest) -> None:
        if request.sequence_id in self._sessions:  # otherwise the session has its error already
            self.link.send(commits=commits, requests=(request,))

    def _take(self, _link: Any, frame: DraftLinkResponse) -> None:
        validate_frame(frame.blocks, frame.errors, frame.pending_ids)
        self._deliver(frame.blocks)
        self._note_pending(frame.pending_ids)
        self._take_errors(frame.errors, lambda error: error)

    def _up(self, _link: Any) -> None:
        self.breaker.reset()
        self._is_up.set()
        self._pool.on_up()

    def _down(self, _link: Any, why: BetokenError) -> None:
        self._is_up.clear()
        self.breaker.reset()
        self._lose_sessions(DraftWorkerLostError(f"draft worker {self.link.address} went away: {why}"))


class DraftPool:
    """All draft workers of this router."""

    def __init__(
        self,
        addresses: Sequence[str],
        check_hello: Callable[[WorkerHello], None],
        sequence_ids: SequenceIds,
        patience: Patience,
        make_breaker: Callable[[], CircuitBreaker],
        probe_timeout_s: float,
        options: LinkOptions,
        on_up: Callable[[], None],
    ) -> None:
        """`check_hello` raises for workers that do not fit the tokenizer; `on_up` follows each that was met."""
        self.check_hello = check_hello
        self.sequence_ids = sequence_ids
        self.patience = patience
        self.on_up = on_up
        self.workers = [DraftWorker(address, self, make_breaker(), options) for address in addresses]
        self._probe_timeout_s = probe_timeout_s

    @property
    def known_drafters(self) -> list[str]:
        """Names hosted by any worker this router has met, in order of the workers."""
        return list(dict.fromkeys(name for worker in self.workers for name in worker.drafters))

    @property
    def sources(self) -> list[SourceInfo]:
        """The sources of draft tokens of every worker this router has met; one entry a name."""
        met = (source for worker in self.workers for source in worker.sources)
        return list({source.name: source for source in met}.values())

    @property
    def has_met_all(self) -> bool:
        """Whether each worker told what it hosts, be it away by now, or was refused."""
        links = [worker.link for worker in self.workers]
        return all(link.hello is not None or link.state is LinkState.REFUSED for link in links)

    @property
    def ready_drafters(self) -> list[str]:
        """Names that can be had right now."""
        return list(dict.fromkeys(name for worker in self.workers if worker.is_ready for name in worker.drafters))

    def least_loaded(self, drafter: str, without: Collection[DraftWorker] = ()) -> DraftWorker | None:
        """The working draft worker with most room that hosts `drafter` (empty: any); None without one.

        `without`: workers not to be taken.
        """
        fitting = [
            worker
            for worker in self.workers
            if worker.is_ready
            and worker.has_room
            and worker not in without
            and (not drafter or drafter in worker.drafters)
        ]
        return min(fitting, key=lambda worker: worker.load_factor, default=None)

    async def run(self, probes: AioPool) -> None:
        """Keep all links and circuits until cancelled; `probes` bounds how many workers are probed at once."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(worker.link.run())
                tasks.create_task(worker.keep_probed(probes, self._probe_timeout_s))

    async def close(self) -> None:
        """Drain and close all links."""
        await asyncio.gather(*(worker.link.close() for worker in self.workers))
