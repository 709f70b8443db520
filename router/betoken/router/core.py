"""The router's core: pools of workers, admission, and the life of one admitted request.

Its interface is requests and events, without gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from asyncio_pool import AioPool

from betoken.common.economy.gate import SpeculationGate
from betoken.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from betoken.router.access.keys import Keys
from betoken.router.policy.admission import Admission
from betoken.router.policy.byte_budget import ByteBudget
from betoken.router.policy.speculation_policies import SpeculationPolicies
from betoken.router.request import GenerationRequest, SequenceIds, waiting_s
from betoken.router.round.attached_rounds import AttachedRounds
from betoken.router.round.events import Event, Finished, Started
from betoken.router.round.failover import Failover
from betoken.router.round.round_loop import RoundLoop
from betoken.router.round.speculator import Speculator
from betoken.router.round.stats import SpeculationCounts
from betoken.router.round.token_buffer import TokenBuffer
from betoken.router.settings import AUTO_DRAFTER, NO_DRAFTER, RouterSettings
from betoken.router.text.answer import Answer
from betoken.router.text.tokenizer import Tokenizer
from betoken.router.workers.circuit_breaker import CircuitBreaker
from betoken.router.workers.draft_pool import DraftPool
from betoken.router.workers.mailbox import Patience
from betoken.router.workers.verify_pool import VerifyPool
from betoken.router.workers.worker import WorkerOptions
from betoken.router.workers.worker_identity import ServedModel
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link import LinkOptions, OutboxLimits
from betoken.v1.types_pb2 import SourceInfo, WorkerHello

_log = logging.getLogger(__name__)

Emit: TypeAlias = Callable[[Event], Awaitable[None]]
_RESUMED_AT_ONCE = 64  # ids; half a millisecond with the most and longest stop strings


class Router:
    """Everything behind the public service. Made inside a running event loop; `run` keeps its links."""

    def __init__(self, settings: RouterSettings, tokenizer: Tokenizer, link_options: LinkOptions | None = None) -> None:
        self.settings = settings
        self._fast_wake = FastWake(settings.fast_wake)
        self.tokenizer = tokenizer
        self.keys = Keys(settings.api_keys_file, on_change=lambda: self.admission.capacity_changed())
        options = link_options or LinkOptions(router_id=settings.router_id, tls=settings.worker_tls)
        options = replace(options, limits=OutboxLimits(max_message_bytes=settings.max_message_bytes))
        workers = WorkerOptions(options, SequenceIds(), Patience())
        self.verify = VerifyPool(
            settings.verify,
            workers,
            settings.verify_timeout_s,
            self._check_verify_hello,
            lambda hello: ServedModel.of(hello, tokenizer.fingerprint, tokenizer.chat_eos_id),
            on_change=self._workers_changed,
            allow_weights_change=settings.allow_weights_change,
        )
        self.draft = DraftPool(
            settings.draft,
            workers,
            settings.first_draft_timeout_s,
            lambda: CircuitBreaker(settings.max_draft_failures, settings.min_probe_pause_s, settings.max_probe_pause_s),
            self._check_draft_hello,
            on_up=self._draft_worker_met,
        )
        self.admission = Admission(
            settings.max_concurrency,
            settings.max_queue,
            settings.queue_timeout_s,
            lambda: self.verify.capacity,
            self.verify.none_ready,
        )
        self.waiting_bytes = ByteBudget(settings.max_waiting_bytes)
        """Bytes of the requests that are read and not yet admitted."""
        self.policies = SpeculationPolicies(lambda: self.admission.num_running)
        self._failover = Failover(self.verify, AioPool(settings.max_reopens), settings.failover_timeout_s)
        self._probes = AioPool(settings.max_probes)
        self._told: set[tuple[str, str]] = set()
        """Addresses of draft workers whose context is short, and what was said of it."""
        self._is_draining = False
        self.is_cut_off = False
        """Whether what still runs is ended, the time for it being over."""

    async def run(self) -> None:
        """Keep links and circuits until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.keys.run())
            tasks.create_task(self.verify.run())
            tasks.create_task(self.draft.run(self._probes))

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests and return when none is left."""
        self._is_draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.admission.wait_idle()
        except BaseException:
            self.is_cut_off = True
            raise

    async def close(self) -> None:
        """Close all links."""
        await asyncio.gather(self.verify.close(), self.draft.close())

    async def model(self, timeout_s: float | None = None) -> ServedModel:
        """Description of the served model; waits until a verify worker was met.

        `timeout_s` is what the client's deadline leaves.

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
        with what was done for it, also when it ends otherwise.

        Raises:
            BetokenError: refused, unavailable, or too late; whatever was begun is undone on the workers.
        """
        try:
            async with asyncio.timeout(request.left_s) as limit:
                answer = await self._answer(request)
                if self._is_draining:
                    raise UnavailableError("the router is shutting down")
                if answer.finish is not None:  # the resumed answer was complete
                    await emit(Started(request))
                    await emit(_finished(request, answer, counts))
                    return
                limit_s = waiting_s(self.settings.queue_timeout_s, request.left_s)
                async with self.admission.slot(limit_s, request.tenant, request.accounts) as counts.queue_ns:
                    loop, tokens = await self._round_loop(request, answer, counts)
                    with self._fast_wake.held():
                        await _stream(request, loop, tokens, emit)
                    await emit(_finished(request, answer, counts))
        except TimeoutError:
            if limit.expired():
                raise DeadlineExceededError("the time allowed for the request is over") from None
            raise

    async def _answer(self, request: GenerationRequest) -> Answer:
        """The answer so far. Resumed ids are taken in parts: a whole context of them would hold up every stream."""
        tokenizer = self.tokenizer
        answer = Answer(request.stop_rules(tokenizer.special_names), tokenizer.detokenizer(request.prompt_ids))
        num_kept = 0
        for start in range(0, len(request.resume_ids), _RESUMED_AT_ONCE):
            num_kept += answer.append(request.resume_ids[start : start + _RESUMED_AT_ONCE]).num_tokens
            await asyncio.sleep(0)
        if num_kept < len(request.resume_ids):
            raise InvalidArgumentError(
                "resume_ids", f"{len(request.resume_ids)} ids", f"must not go on beyond the answer's end at {num_kept}"
            )
        return answer

    async def _round_loop(
        self, request: GenerationRequest, answer: Answer, counts: SpeculationCounts
    ) -> tuple[RoundLoop, TokenBuffer]:
        settings = self.settings
        limit_s = waiting_s(settings.failover_timeout_s, request.left_s)
        worker = await self.verify.wait_ready(limit_s, request.identity)
        speculator = Speculator(
            request,
            self.draft,
            worker.hello.vocab_size,
            settings.draft_timeout_s,
            settings.first_draft_timeout_s,
            self._gate(request),
        )
        tokens = TokenBuffer(pause_s=lambda: self.admission.num_running / settings.max_messages_per_s)
        attached = AttachedRounds(request, self._gate(request, is_attached=True))
        return RoundLoop(request, answer, worker, speculator, self._failover, tokens, counts, attached), tokens

    @property
    def known_drafters(self) -> list[str]:
        """Names of drafters that any worker this router has met hosts or has attached."""
        return list(dict.fromkeys((*self.draft.known_drafters, *self.verify.known_drafters)))

    @property
    def predicting_drafters(self) -> list[str]:
        """Names of known drafters that look up predictions."""
        return list(dict.fromkeys((*self.draft.predicting_drafters, *self.verify.predicting_drafters)))

    @property
    def ready_drafters(self) -> list[str]:
        """Names that can be had right now."""
        return list(dict.fromkeys((*self.draft.ready_drafters, *self.verify.ready_drafters)))

    @property
    def sources(self) -> list[SourceInfo]:
        """The sources of draft tokens; one entry a name."""
        return list({source.name: source for source in (*self.draft.sources, *self.verify.sources)}.values())

    def _gate(self, request: GenerationRequest, *, is_attached: bool = False) -> SpeculationGate | None:
        """Return the speculation policy of a request; None if it always speculates."""
        known = self.verify.known_drafters if is_attached else self.draft.known_drafters
        if not self.settings.drafts_must_pay or request.drafter is None or request.drafter.name not in known:
            return None
        return self.policies.of(request, is_attached=is_attached)

    def _check_verify_hello(self, hello: WorkerHello) -> None:
        if not hello.weights_fingerprint.startswith(self.settings.weights_fingerprint):
            raise FailedPreconditionError(
                f"--weights-fingerprint is {self.settings.weights_fingerprint}, the verify worker has "
                f"{hello.weights_fingerprint or 'none'}"
            )
        if hello.tokenizer_hash != self.tokenizer.hash:
            raise self._tokenizers_differ(hello)
        if self.settings.model and hello.model_id != self.settings.model:
            raise FailedPreconditionError(
                f"this router serves {self.settings.model}, the verify worker has {hello.model_id}"
            )

    def _check_draft_hello(self, hello: WorkerHello) -> None:
        # A worker without a model (n-grams) needs ids only and has no tokenizer to compare.
        if hello.tokenizer_hash and hello.tokenizer_hash != self.tokenizer.hash:
            raise self._tokenizers_differ(hello)

    def short_context(self, hello: WorkerHello) -> str:
        """A hint about a draft worker's shorter context; empty without one."""
        served = self.verify.model
        shortest = min(filter(None, (hello.max_context, hello.draft_context)), default=0)
        if served is None or not 0 < shortest < served.hello.max_context:
            return ""
        return f"drafts texts of up to {shortest} tokens only; the target's context is {served.hello.max_context}"

    def _workers_changed(self) -> None:
        self.admission.capacity_changed()
        self._log_short_contexts()

    def _draft_worker_met(self) -> None:
        self._warn_without_default_drafter()
        self._log_short_contexts()

    def _log_short_contexts(self) -> None:
        """Once for each worker: links are made again and again."""
        for worker in self.draft.workers:
            told = (worker.link.address, self.short_context(worker.link.hello) if worker.link.hello else "")
            if told[1] and told not in self._told:
                self._told.add(told)
                _log.warning("draft worker %s %s", *told)

    def _warn_without_default_drafter(self) -> None:
        wanted, known = self.settings.drafter, self.known_drafters
        if wanted not in (AUTO_DRAFTER, NO_DRAFTER, *known):
            _log.warning(
                "--drafter %s: no connected draft worker hosts it, they host %s; by default requests get no drafts",
                wanted,
                ", ".join(known) or "none",
            )

    def _tokenizers_differ(self, hello: WorkerHello) -> FailedPreconditionError:
        own = f"{self.settings.tokenizer} has {self.tokenizer.hash} of {self.tokenizer.vocab_size} ids"
        other = f"the {hello.role} worker's {hello.model_id or 'model'} has {hello.tokenizer_hash or 'none'}"
        return FailedPreconditionError(f"tokenizers differ: {own}, {other}, its model {hello.vocab_size} rows")


async def _stream(request: GenerationRequest, loop: RoundLoop, waiting: TokenBuffer, emit: Emit) -> None:
    """Run `loop` concurrently with the emitter of its tokens, so that a slow stream does not block a round."""
    error: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(loop.run())
        try:
            await emit(Started(request))
            while (tokens := await waiting.get()) is not None:
                await emit(tokens)
        except Exception as caught:  # raised below: a TaskGroup would wrap it
            error = caught
            running.cancel()
    if error is not None:
        raise error


def _finished(request: GenerationRequest, answer: Answer, counts: SpeculationCounts) -> Finished:
    assert answer.finish is not None
    first_ns = counts.first_token_ns
    return Finished(
        reason=answer.finish,
        stop=answer.stop,
        num_prompt_tokens=len(request.prompt_ids),
        num_output_tokens=len(answer.output_ids),
        num_cached_tokens=counts.num_cached_tokens,
        counts=counts,
        queue_ns=counts.queue_ns or 0,
        time_to_first_token_ns=max(0, first_ns - request.received_ns) if first_ns else 0,
        duration_ns=time.perf_counter_ns() - request.received_ns,
    )
