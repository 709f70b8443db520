"""The public gRPC service: messages in, the core's events out as messages.

Validates and converts; decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import ExitStack
from functools import partial
from typing import Any

from betoken.common.release import __version__
from betoken.router import intake
from betoken.router.core import Router
from betoken.router.policy import drafter_choice
from betoken.router.request import GenerationRequest
from betoken.router.request_scope import RequestScope
from betoken.router.round.events import Event, Finished, PromptLogprobsPart, Started, Tokens
from betoken.router.scopes import RequestScopes
from betoken.router.several import Emit, several
from betoken.router.text.answer import FinishReason
from betoken.router.workers.draft_worker import DraftWorker
from betoken.router.workers.verify_worker import SILENCE, VerifyWorker
from betoken.router.workers.worker_identity import ServedModel
from betoken.router.workers.worker_metrics import observe_workers
from betoken.rpc.sampling import NEUTRAL
from betoken.rpc.servicing import typed_errors
from betoken.rpc.unread import ReplyWriter
from betoken.v1 import generation_pb2 as pb

_MAX_NS = (1 << 64) - 1
"""Range of the fields; sums of times invented by a worker may exceed it."""
_ID_BYTES = 4
_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


class GenerationServicer:
    """`betoken.v1.GenerationService` over a `Router`."""

    def __init__(self, router: Router, scopes: RequestScopes) -> None:
        self._router = router
        self._keys = router.keys
        self._scopes = scopes
        observe_workers((*router.verify.workers, *router.draft.workers))
        router.policies.observe()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802 (gRPC names it)
        """Stream one generation."""
        async with self._scopes.request(context, is_chat=request.HasField("messages")) as scope:
            with (
                self._router.waiting_bytes.hold(request.ByteSize()) as held_bytes,
                ReplyWriter(context, self._router.settings.max_unread_s) as writer,
                ExitStack() as stack,
            ):
                caller = self._keys.caller(context.invocation_metadata())
                caller.check_tokens()
                caller.check_input(request)
                caller.check_answers(request.n)
                generation = await intake.prepare(
                    request,
                    self._router,
                    caller,
                    request_id=scope.request_id,
                    traceparent=scope.traceparent,
                    timeout_s=scope.timeout_s,
                )
                drafter = self._hosted_drafter(generation)
                scope.accepted(generation, drafter)
                held_bytes.add(_ID_BYTES * (len(generation.prompt_ids) + len(generation.predicted_ids)))
                further = intake.further_answers(generation, request.n)
                reserved = stack.enter_context(caller.reserve(_most_tokens(generation, 1 + len(further))))
                del request  # it may be large, and the answer long
                turn = asyncio.Lock()

                async def send(index: int, event: Event, own: RequestScope) -> None:
                    reserved.use(_num_charged(event) if index == 0 or not isinstance(event, Started) else 0)
                    held_bytes.release()
                    async with turn:
                        await writer.write(self._response(event, index))
                    own.sent(event)

                async def answer(index: int, asked: GenerationRequest) -> None:
                    with self._scopes.further(scope, asked.request_id) as own:
                        own.accepted(asked, drafter)
                        await self._router.generate(asked, lambda event: send(index, event, own), own.counts)

                def emit(event: Event) -> Awaitable[None]:
                    return send(0, event, scope)

                def first(emit: Emit) -> Coroutine[Any, Any, None]:
                    return self._router.generate(generation, emit, scope.counts)

                if further:
                    others = [partial(answer, index, asked) for index, asked in enumerate(further, 1)]
                    await several(first, others, emit)
                else:
                    await first(emit)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        """Describe the served model and its workers."""
        exposes_addresses = self._keys.exposes_addresses(context)
        async with typed_errors(context, exposes_addresses=exposes_addresses):
            self._keys.check_if_any(context.invocation_metadata())
            router = self._router
            served = router.verify.model
            if served is None and not request.at_once:
                served = await router.model(context.time_remaining())
            response = pb.GetModelInfoResponse(
                drafters=router.ready_drafters,
                sources=router.sources,
                default_drafter=drafter_choice.default_drafter(router),
                verify_workers=[_worker_info(worker, router, exposes_addresses) for worker in router.verify.workers],
                draft_workers=[_worker_info(worker, router, exposes_addresses) for worker in router.draft.workers],
                has_chat_template=router.tokenizer.chat_template is not None,
                tool_format=router.tokenizer.tool_format,
                version=__version__,
                speculation_policies=router.policies.messages(),
                requires_api_key=self._keys.are_needed,
            )
            if served is not None:
                _describe(response, served)
                response.default_num_draft_tokens = drafter_choice.default_num_draft_tokens(served.hello, router)
            return response
        raise AssertionError("unreachable: typed_errors ends the call")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """Turn text or chat messages into ids."""
        async with typed_errors(context, exposes_addresses=self._keys.exposes_addresses(context)):
            self._keys.caller(context.invocation_metadata()).check_input(request)
            with self._router.waiting_bytes.hold(request.ByteSize()):
                return pb.TokenizeResponse(ids=await intake.tokenize(request, self._router))
        raise AssertionError("unreachable: typed_errors ends the call")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        """Turn ids into text."""
        async with typed_errors(context, exposes_addresses=self._keys.exposes_addresses(context)):
            self._keys.caller(context.invocation_metadata()).check_input(request)
            model = (await self._router.model(context.time_remaining())).hello
            with self._router.waiting_bytes.hold(request.ByteSize()):
                return await intake.detokenize(request, self._router, model.vocab_size)
        raise AssertionError("unreachable: typed_errors ends the call")

    def _response(self, event: Event, index: int) -> pb.GenerateResponse:
        """The message of an event of that answer."""
        match event:
            case Tokens():
                return _tokens(event, index)
            case PromptLogprobsPart(first_position, logprobs):
                told = pb.GeneratePromptLogprobs(first_position=first_position, logprobs=logprobs)
                return pb.GenerateResponse(answer=index, prompt_logprobs=told)
            case Started(request):
                return pb.GenerateResponse(
                    answer=index,
                    start=pb.GenerateStart(
                        prompt_ids=request.prompt_ids,
                        seed=request.sampling.seed,
                        model=request.model,
                        request_id=request.request_id,
                        mode=request.mode,
                        drafter=self._hosted_drafter(request),
                        sampling=request.sampling,
                        system_fingerprint=request.system_fingerprint,
                    ),
                )
            case Finished():
                return pb.GenerateResponse(answer=index, finish=_finish(event))

    def _hosted_drafter(self, request: GenerationRequest) -> str:
        """Its drafter, if it is one: of a worker that was not met, and to be resumed, requests name what they like."""
        name = request.drafter.name if request.drafter is not None else ""
        return name if name in self._router.known_drafters else ""


def _describe(response: pb.GetModelInfoResponse, served: ServedModel) -> None:
    hello = served.hello
    response.model = hello.model_id
    response.vocab_size = hello.vocab_size
    response.max_context = hello.max_context
    response.eos_token_ids.extend(served.eos_token_ids)
    response.default_sampling.MergeFrom(NEUTRAL)
    response.default_sampling.MergeFrom(hello.default_sampling)
    response.verification_modes.extend(hello.verification_modes)
    response.system_fingerprint = served.system_fingerprint


def _tokens(event: Tokens, index: int) -> pb.GenerateResponse:
    # Filled in place: messages that are made first and then copied into their parent take twice as long.
    response = pb.GenerateResponse(answer=index)
    message = response.tokens
    add = message.tokens.add
    for emitted in event.rounds:
        places = zip(emitted.ids, emitted.origins, emitted.sources, emitted.num_chars, strict=True)
        tokens = [add(id=i, origin=origin, source=source, num_chars=n) for i, origin, source, n in places]
        for token, logprobs in zip(tokens, emitted.logprobs, strict=False):
            token.logprobs.CopyFrom(logprobs)
        for token, num_held in zip(tokens, emitted.num_held_chars, strict=False):
            token.num_held_chars = num_held
        if emitted.times is not None:
            message.rounds.append(emitted.times)
    message.text = "".join(emitted.text for emitted in event.rounds)
    return response


def _finish(event: Finished) -> pb.GenerateFinish:
    counts = event.counts
    return pb.GenerateFinish(
        reason=_REASONS[event.reason],
        stop=event.stop,
        usage=pb.Usage(
            prompt_tokens=event.num_prompt_tokens,
            output_tokens=event.num_output_tokens,
            cached_prompt_tokens=event.num_cached_tokens,
        ),
        speculation=pb.SpeculationStats(
            num_drafts=counts.num_drafts,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_accepted_per_position=counts.num_accepted_per_position,
            num_drafted_per_position=counts.num_drafted_per_position,
            num_verify_forwards=counts.num_verify_forwards,
            num_emitted_tokens=counts.num_emitted_tokens,
            draft_forward_ns=counts.draft_forward_ns,
            draft_queue_ns=counts.draft_queue_ns,
            verify_forward_ns=min(counts.verify_forward_ns, _MAX_NS),
            verify_queue_ns=min(counts.verify_queue_ns, _MAX_NS),
            round_ns=counts.round_ns,
            num_failed_drafts=counts.num_failed_drafts,
            num_failovers=counts.num_failovers,
            router_overhead_p50_ns=counts.router_overhead_p50_ns,
            num_rounds=counts.num_rounds,
            first_draft_forward_ns=counts.first_draft_forward_ns,
            num_draft_forwards=counts.num_draft_forwards,
            num_accepted_prediction_tokens=counts.num_accepted_prediction_tokens,
            num_rejected_prediction_tokens=counts.num_rejected_prediction_tokens,
            num_failed_drafts_by_reason=counts.num_failed_drafts_by_reason,
            policy=counts.policy,
        ),
        queue_ns=event.queue_ns,
        time_to_first_token_ns=event.time_to_first_token_ns,
        duration_ns=event.duration_ns,
    )


def _most_tokens(generation: GenerationRequest, num_answers: int) -> int:
    """Largest number of tokens that a request reads and writes."""
    num_prompt = len(generation.prompt_ids)
    return num_prompt + num_answers * (generation.max_length - num_prompt - len(generation.resume_ids))


def _num_charged(event: Event) -> int:
    """Tokens read or written by the time of this event."""
    match event:
        case Started(request):
            return len(request.prompt_ids)
        case Tokens():
            return event.num_tokens
        case _:
            return 0


def _worker_info(worker: VerifyWorker | DraftWorker, router: Router, exposes_addresses: bool) -> pb.WorkerInfo:
    link = worker.link
    info = pb.WorkerInfo(address=link.address, state=link.state, detail=link.detail)
    if isinstance(worker, VerifyWorker) and worker.is_silent and worker.is_ready:
        info.detail = SILENCE
    if link.is_up and link.hello is not None:
        info.hello.CopyFrom(link.hello)
        if isinstance(worker, DraftWorker):
            info.detail = info.detail or router.short_context(link.hello)
    if link.load is not None:
        info.load.CopyFrom(link.load)
        for cost in info.hello.step_costs if link.load.step_time_ratio > 0 else ():
            cost.ns = round(min(_MAX_NS, cost.ns * link.load.step_time_ratio))  # the ratio may be infinite
    if not exposes_addresses:
        info.address = info.detail = ""
        if info.HasField("hello"):
            info.hello.ClearField("worker_id")  # holds the host's name
    return info
