"""From a client's message to a validated request, in stages: `Received`, `Parsed`, `Encoded`, `GenerationRequest`.

Each stage takes a record and returns a richer one. All bad input is rejected here, by field, value and limit; no later
part checks it again.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from betoken.router.access.keys import ANYBODY, Caller
from betoken.router.core import Router
from betoken.router.request.generation import AUTO_DRAFTER, GenerationRequest
from betoken.router.request.worker_identity import ServedModel
from betoken.router.text.constraint import ConstraintLimits, check_constraint
from betoken.router.text.infill_prompt import predicted_of_infill, with_infill_ends
from betoken.router.text.tokenizer import Tokenizer
from betoken.router.tokenization import predicted_ids, prompt_ids
from betoken.rpc.sampling import resolve_sampling
from betoken.rpc.validation import (
    check_num_received,
    check_range,
    validate_generate,
    validate_resume_ids,
    validate_sampling,
)
from betoken.v1.generation_pb2 import GenerateRequest, Speculation
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_UNSPECIFIED,
    SamplingParams,
    VerificationMode,
    WorkerHello,
)


@dataclass(frozen=True, slots=True)
class Received:
    """A call's message, not checked yet."""

    message: GenerateRequest
    caller: Caller
    request_id: str
    traceparent: str
    timeout_s: float | None
    """Seconds until the client's deadline; None = no deadline."""
    deadline_s: float
    """The earlier of the client's and the router's deadline, `time.monotonic()`."""
    received_ns: int
    """`time.perf_counter_ns()` of the call."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A well-formed message for the served model."""

    received: Received
    tenant: str
    served: ServedModel
    is_resumed: bool
    """Whether it resumes a broken stream, even one without a token."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A request with its ids and its resolved sampling."""

    parsed: Parsed
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    """Every field set, the seed included."""
    predicted_ids: Sequence[int]


async def prepare(
    message: GenerateRequest,
    router: Router,
    caller: Caller = ANYBODY,
    *,
    request_id: str,
    traceparent: str,
    timeout_s: float | None,
) -> GenerationRequest:
    """The validated request; `timeout_s`: seconds until the client's deadline, None = no deadline.

    Raises:
        InvalidArgumentError: a field outside its limits, or a constraint that cannot be kept.
        PermissionDeniedError: another tenant than the caller's.
        NotFoundError: another model than the served one.
        FailedPreconditionError: another system than the one the client began with.
        UnavailableError: no verify worker is known yet, so limits are not known either.
    """
    limit_s = min(router.settings.max_request_s, math.inf if timeout_s is None else timeout_s)
    deadline_s, received_ns = time.monotonic() + limit_s, time.perf_counter_ns()
    received = Received(message, caller, request_id, traceparent, timeout_s, deadline_s, received_ns)
    return await resolve(await encode(await parse(received, router), router), router)


async def parse(received: Received, router: Router) -> Parsed:
    """Check the message, without its text, against the caller, the served model and the router's limits."""
    message, settings = received.message, router.settings
    validate_generate(message)
    tenant = received.caller.tenant_of(message.tenant)
    served = await router.model(received.timeout_s)
    if message.model and not router.verify.serves(message.model):
        raise NotFoundError(f"model {message.model!r} is not served here; {served.hello.model_id!r} is")
    if message.system_fingerprint not in ("", served.system_fingerprint):
        raise FailedPreconditionError(
            f"system_fingerprint {message.system_fingerprint!r} is not served here; {served.system_fingerprint!r} is"
        )
    check_range("n", message.n or 1, 1, min(settings.max_answers, settings.max_concurrency + settings.max_queue))
    is_resumed = bool(message.resume_ids or message.system_fingerprint)  # the latter: broken before the first token
    if not is_resumed:
        router.drafters.check_num_draft_tokens(message.speculation, served.hello)
    return Parsed(received, tenant, served, is_resumed)


async def encode(parsed: Parsed, router: Router) -> Encoded:
    """Tokenize the texts, and set every sampling field."""
    message, model = parsed.received.message, parsed.served.hello
    ids = await prompt_ids(message, model, router)
    sampling = _sampling(message, model, len(ids), router.tokenizer)
    return Encoded(parsed, ids, sampling, await predicted_ids(message, model, router))


async def resolve(encoded: Encoded, router: Router) -> GenerationRequest:
    """Select the drafter, compile the constraint, and check the rest: every field of the result is set."""
    parsed, received = encoded.parsed, encoded.parsed.received
    message, served = received.message, parsed.served
    speculation, sampling, num_prompt = message.speculation, encoded.sampling, len(encoded.prompt_ids)
    drafter = router.drafters.choose(
        speculation, is_predicted=bool(encoded.predicted_ids), is_resumed=parsed.is_resumed
    )
    predicted = encoded.predicted_ids
    predicting = router.fleet.predicting_drafters
    if not predicted and drafter is not None and (drafter.name in predicting or drafter.name == AUTO_DRAFTER):
        predicted = predicted_of_infill(router.tokenizer, encoded.prompt_ids)
    eos_token_ids = with_infill_ends(
        served.eos_token_ids, router.tokenizer, encoded.prompt_ids, served.hello.vocab_size
    )
    limits = ConstraintLimits(router.settings.max_constraint_bytes, router.settings.constraint_timeout_s)
    constraint = await check_constraint(
        message, served.hello, sampling, eos_token_ids, encoded.prompt_ids, router.tokenizer, limits
    )
    return GenerationRequest(
        request_id=received.request_id,
        model=message.model or served.hello.model_id,
        prompt_ids=encoded.prompt_ids,
        sampling=sampling,
        mode=_mode(speculation, served.hello),
        **_typical_bounds(speculation),
        eos_token_ids=eos_token_ids,
        max_length=num_prompt + sampling.max_new_tokens,
        identity=served.identity,
        system_fingerprint=served.system_fingerprint,
        resume_ids=tuple(message.resume_ids),
        num_received_logprobs=_num_received_logprobs(message, num_prompt),
        constraint=constraint,
        predicted_ids=predicted,
        drafter=drafter,
        is_resumed=parsed.is_resumed,
        is_drafter_fixed=speculation.drafter.name not in ("", AUTO_DRAFTER) or bool(speculation.drafter.settings),
        num_draft_tokens=speculation.num_draft_tokens or router.drafters.default_num_draft_tokens(served.hello),
        reports_rounds=speculation.report_rounds,
        tenant=parsed.tenant,
        accounts=received.caller.accounts,
        traceparent=received.traceparent,
        deadline_s=received.deadline_s,
        received_ns=received.received_ns,
    )


def _sampling(message: GenerateRequest, model: WorkerHello, prompt_length: int, tokenizer: Tokenizer) -> SamplingParams:
    """The sampling with every field set. Rejects fields that the model does not support, and invalid resumed ids."""
    vocab_size, max_context = model.vocab_size, model.max_context
    validate_sampling(message.sampling, vocab_size=vocab_size, max_context=max_context, prompt_length=prompt_length)
    _check_stop_strings(message.sampling.stop, tokenizer)
    sampling = resolve_sampling(
        message.sampling,
        model.default_sampling,
        seed=secrets.randbits(64),
        prompt_length=prompt_length,
        max_context=max_context,
        vocab_size=vocab_size,
    )
    validate_resume_ids(
        message.resume_ids,
        vocab_size=vocab_size,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        has_seed=message.sampling.HasField("seed"),
    )
    return sampling


def _check_stop_strings(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Reject stop strings that no answer can contain."""
    for index, stop in enumerate(stops):
        if absent := tokenizer.alphabet.absent(stop):
            limit = f"must be of characters that the model's tokens make: none makes {absent[0]!r}"
            raise InvalidArgumentError(f"sampling.stop[{index}]", stop, limit)


def _num_received_logprobs(message: GenerateRequest, num_prompt_ids: int) -> int:
    """Number of prompt logprobs that the client has, all of them once it has a token."""
    check_num_received("resume_prompt_logprobs", message.resume_prompt_logprobs, message.sampling, num_prompt_ids)
    return num_prompt_ids - 1 if message.resume_ids else message.resume_prompt_logprobs


def _typical_bounds(speculation: Speculation) -> dict[str, Any]:
    names = ("posterior_threshold", "posterior_alpha")
    return {name: getattr(speculation, name) for name in names if speculation.HasField(name)}


def _mode(speculation: Speculation, model: WorkerHello) -> VerificationMode:
    if speculation.mode == VERIFICATION_MODE_UNSPECIFIED:
        return VERIFICATION_MODE_COUPLED
    if speculation.mode != VERIFICATION_MODE_COUPLED and speculation.mode not in model.verification_modes:
        known = VerificationMode.values()  # a newer worker may offer others
        offered = ", ".join(VerificationMode.Name(mode) for mode in model.verification_modes if mode in known)
        raise InvalidArgumentError(
            "speculation.mode", VerificationMode.Name(speculation.mode), f"must be one of: {offered}"
        )
    return speculation.mode
