"""The public gRPC service: each method checks its caller, and converts between messages and the router's records."""

from __future__ import annotations

from typing import Any

from betoken.router import intake
from betoken.router.core import Router
from betoken.router.generate_call import GenerateCall
from betoken.router.model_info import model_info
from betoken.router.parallel_sampling import requests_of
from betoken.router.request.generation import GenerationRequest
from betoken.router.scopes import RequestScopes
from betoken.router.tokenization import detokenize, tokenize
from betoken.router.workers.worker_metrics import observe_workers
from betoken.rpc.servicing import typed_errors
from betoken.rpc.unread import ReplyWriter
from betoken.v1 import generation_pb2 as pb

_ID_BYTES = 4


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
        router = self._router
        async with self._scopes.request(context, is_chat=request.HasField("messages")) as scope:
            with (
                router.waiting_bytes.hold(request.ByteSize()) as held_bytes,
                ReplyWriter(context, router.settings.max_unread_s) as writer,
            ):
                caller = self._keys.caller(context.invocation_metadata())
                caller.check_tokens()
                caller.check_input(request)
                caller.check_answers(request.n)
                first = await intake.prepare(
                    request,
                    router,
                    caller,
                    request_id=scope.request_id,
                    traceparent=scope.traceparent,
                    timeout_s=scope.timeout_s,
                )
                scope.accepted(first)
                held_bytes.add(_ID_BYTES * (len(first.prompt_ids) + len(first.predicted_ids)))
                requests = requests_of(first, request.n)
                del request  # it may be large, and the answer long
                with caller.reserve(_most_tokens(first, len(requests))) as reserved:
                    call = GenerateCall(router, self._scopes, scope, writer, held_bytes, reserved)
                    await call.run(requests)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:  # noqa: N802
        """Describe the served model and its workers."""
        exposes_addresses = self._keys.exposes_addresses(context)
        async with typed_errors(context, exposes_addresses=exposes_addresses):
            self._keys.check_if_any(context.invocation_metadata())
            router = self._router
            served = router.verify.model
            if served is None and not request.at_once:
                served = await router.model(context.time_remaining())
            return model_info(router, served, exposes_addresses=exposes_addresses)
        raise AssertionError("unreachable: typed_errors ends the call")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """Turn text or chat messages into ids."""
        async with typed_errors(context, exposes_addresses=self._keys.exposes_addresses(context)):
            self._keys.caller(context.invocation_metadata()).check_input(request)
            with self._router.waiting_bytes.hold(request.ByteSize()):
                return pb.TokenizeResponse(ids=await tokenize(request, self._router))
        raise AssertionError("unreachable: typed_errors ends the call")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        """Turn ids into text."""
        async with typed_errors(context, exposes_addresses=self._keys.exposes_addresses(context)):
            self._keys.caller(context.invocation_metadata()).check_input(request)
            model = (await self._router.model(context.time_remaining())).hello
            with self._router.waiting_bytes.hold(request.ByteSize()):
                return await detokenize(request, self._router, model.vocab_size)
        raise AssertionError("unreachable: typed_errors ends the call")


def _most_tokens(generation: GenerationRequest, num_answers: int) -> int:
    """Largest number of tokens that a request reads and writes."""
    num_prompt = len(generation.prompt_ids)
    return num_prompt + num_answers * (generation.max_length - num_prompt - len(generation.resume_ids))
