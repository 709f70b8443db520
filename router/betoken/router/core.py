"""The router behind its gRPC service: the parts that all requests share, and the way of one validated request.

A request passes from record to record: `GenerationRequest`, `Generation` (with the answer so far), `Placed` (with a
verify worker), `Running` (with the loop of its rounds).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from asyncio_pool import AioPool

from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.errors import DeadlineExceededError, UnavailableError
from betoken.router.access.keys import Keys
from betoken.router.policy.admission import Admission
from betoken.router.policy.byte_budget import ByteBudget
from betoken.router.request.generation import GenerationRequest, waiting_s
from betoken.router.request.worker_identity import ServedModel
from betoken.router.round.draft_timeouts import DraftTimeouts
from betoken.router.round.events import Emit, Started
from betoken.router.round.failover import Failover
from betoken.router.round.generation import Generation, Placed
from betoken.router.round.request_sources import RequestSources
from betoken.router.round.round_loop import RoundLoop
from betoken.router.round.running import Running
from betoken.router.round.speculation_policies import SpeculationPolicies
from betoken.router.round.speculator import Speculator
from betoken.router.round.stats import SpeculationCounts
from betoken.router.round.token_buffer import TokenBuffer
from betoken.router.settings import RouterSettings
from betoken.router.text.tokenizer import Tokenizer
from betoken.router.workers.circuit_breaker import BreakerOptions
from betoken.router.workers.draft_pool import DraftPool
from betoken.router.workers.drafter_choice import Drafters
from betoken.router.workers.fleet import Fleet
from betoken.router.workers.fleet_log import FleetLog
from betoken.router.workers.handshakes import Handshakes
from betoken.router.workers.mailbox import Patience
from betoken.router.workers.verify_pool import VerifyPool
from betoken.router.workers.worker import SequenceIds, WorkerOptions
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link import LinkOptions, OutboxLimits


class Router:
    """Everything behind the public service. Made inside a running event loop; `run` keeps its links."""

    def __init__(self, settings: RouterSettings, tokenizer: Tokenizer, link_options: LinkOptions | None = None) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self._fast_wake = FastWake(settings.fast_wake)
        self.fleet = _fleet(settings, tokenizer, link_options)
        self.verify, self.draft = self.fleet.verify, self.fleet.draft
        self.admission = Admission(
            settings.max_concurrency, settings.max_queue, settings.queue_timeout_s, self.fleet.verify
        )
        self.keys = Keys(settings.api_keys_file, on_change=self.admission.capacity_changed)
        self.verify.subscribe(self.admission.capacity_changed)
        FleetLog(self.fleet, settings.drafter)
        self.drafters = Drafters(self.fleet, settings.drafter, settings.num_draft_tokens)
        self.waiting_bytes = ByteBudget(settings.max_waiting_bytes)
        """Bytes of the requests that are read and not yet admitted."""
        self.policies = SpeculationPolicies(self.admission, self.fleet, drafts_must_pay=settings.drafts_must_pay)
        self._failover = Failover(self.verify, AioPool(settings.max_reopens), settings.failover_timeout_s)
        self._is_draining = False
        self.is_cut_off = False
        """Whether running requests are ended because the time to drain is over."""

    async def run(self) -> None:
        """Keep links and circuits until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keys.run())
            tasks.create_task(self.fleet.run(AioPool(self.settings.max_probes)))

    async def drain(self, grace_s: float) -> None:
        """Reject new requests and return when none is left."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.admission.wait_idle()
        except BaseException:
            self.is_cut_off = True
            raise

    async def close(self) -> None:
        """Close all links."""
        await self.fleet.close()

    async def model(self, timeout_s: float | None = None) -> ServedModel:
        """Description of the served model; waits until a verify worker was met.

        `timeout_s`: seconds until the client's deadline; None = no deadline.

        Raises:
            UnavailableError: none was met in time.
        """
        if self.verify.model is None:
            await self.verify.wait_ready(waiting_s(self.settings.ready_timeout_s, timeout_s))
        assert self.verify.model is not None
        return self.verify.model

    @property
    def served_model_id(self) -> str:
        """Id of the served model; empty while no verify worker has been met."""
        return self.verify.model.hello.model_id if self.verify.model is not None else ""

    async def generate(self, request: GenerationRequest, emit: Emit, counts: SpeculationCounts) -> None:
        """Admit and run a request; `emit` gets `Started`, any number of `Tokens`, `Finished`. `counts` are filled
        with the work done for it, also if it fails.

        Raises:
            BetokenError: rejected, unavailable, or too late; its sequences on the workers are closed.
        """
        try:
            async with asyncio.timeout(request.left_s) as limit:
                generation = await Generation.resume(request, self.tokenizer, counts)
                if self._is_draining:
                    raise UnavailableError("the router is shutting down")
                if generation.answer.finish is not None:  # the resumed answer was complete
                    await emit(Started(request))
                    await emit(generation.finished())
                    return
                limit_s = waiting_s(self.settings.queue_timeout_s, request.left_s)
                async with self.admission.slot(limit_s, request.tenant, request.accounts) as counts.queue_ns:
                    running = self._start(await self._place(generation))
                    with self._fast_wake.held():
                        await running.stream(emit)
                    await emit(generation.finished())
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceededError("the time allowed for the request is over") from None
            raise

    async def _place(self, generation: Generation) -> Placed:
        request = generation.request
        limit_s = waiting_s(self.settings.failover_timeout_s, request.left_s)
        return Placed(generation, await self.verify.wait_ready(limit_s, request.identity))

    def _start(self, placed: Placed) -> Running:
        settings, request = self.settings, placed.generation.request

        timeouts = DraftTimeouts(settings.draft_timeout_s, settings.first_draft_timeout_s)

        def make_speculator(request: GenerationRequest, policy: SpeculationPolicy | None) -> Speculator:
            return Speculator(
                request,
                self.draft,
                placed.worker.hello.vocab_size,
                timeouts,
                policy,
                settings.num_outcomes,
                is_overlap_automatic=settings.overlap == "auto",
            )

        sources = RequestSources(request, placed.worker, self.fleet, self.policies, make_speculator)
        buffer = TokenBuffer(pause_s=self._message_pause_s)
        return Running(
            placed.generation,
            Started(request, sources.drafter),
            RoundLoop(placed, sources, self._failover, buffer),
            buffer,
        )

    def _message_pause_s(self) -> float:
        """Seconds between two messages of one stream."""
        return self.admission.num_running / self.settings.max_messages_per_s


def _fleet(settings: RouterSettings, tokenizer: Tokenizer, link_options: LinkOptions | None) -> Fleet:
    links = link_options or LinkOptions(router_id=settings.router_id, tls=settings.worker_tls)
    links = replace(links, limits=OutboxLimits(max_message_bytes=settings.max_message_bytes))
    workers = WorkerOptions(links, SequenceIds(), Patience())
    handshakes = Handshakes(tokenizer, settings.tokenizer, settings.model, settings.weights_fingerprint)
    verify = VerifyPool(
        settings.verify,
        workers,
        settings.verify_timeout_s,
        handshakes,
        allow_weights_change=settings.allow_weights_change,
    )
    breaker = BreakerOptions(settings.max_draft_failures, settings.min_probe_pause_s, settings.max_probe_pause_s)
    return Fleet(verify, DraftPool(settings.draft, workers, settings.first_draft_timeout_s, breaker, handshakes))
