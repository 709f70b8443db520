"""From a client's message to a validated request: limits, tokens, sampling, drafter.

The edge where bad input is refused, naming field, value and limit; behind it nothing is checked again.
"""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from betoken.common.seeds import derived_seed
from betoken.router.access.keys import ANYBODY, Caller
from betoken.router.core import Router
from betoken.router.policy.drafter_choice import (
    check_num_draft_tokens,
    choose_drafter,
    choose_predicting,
    default_num_draft_tokens,
)
from betoken.router.request import GenerationRequest
from betoken.router.text.chat import chat_of
from betoken.router.text.constraint import check_constraint
from betoken.router.text.encoding import TextLimits, encode_chat, encode_text, on_text_thread
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.sampling import resolve_sampling
from betoken.rpc.validation import (
    check_is_text,
    check_num_received,
    check_range,
    validate_detokenize,
    validate_generate,
    validate_prompt_ids,
    validate_resume_ids,
    validate_sampling,
    validate_tokenize,
)
from betoken.v1.generation_pb2 import (
    ChatMessages,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    Speculation,
    TokenizeRequest,
)
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_UNSPECIFIED,
    DrafterChoice,
    SamplingParams,
    VerificationMode,
    WorkerHello,
)

_DECODED_AT_ONCE = 4096  # more ids are turned into text on a thread: about a millisecond
_UNMET_MAX_TOKENS = 1 << 17
"""Maximum number of tokens of a text until a worker has reported the model's context."""


async def prepare(
    message: GenerateRequest,
    router: Router,
    caller: Caller = ANYBODY,
    *,
    request_id: str,
    traceparent: str,
    timeout_s: float | None,
) -> GenerationRequest:
    """The validated request; `timeout_s` is what the client's deadline leaves, None without one.

    Raises:
        InvalidArgumentError: a field outside its limits, or a constraint that cannot be kept.
        PermissionDeniedError: another tenant than the caller's.
        NotFoundError: another model than the served one.
        FailedPreconditionError: another system than the one the client began with.
        UnavailableError: no verify worker is known yet, so limits are not known either.
    """
    limit_s = min(router.settings.max_request_s, math.inf if timeout_s is None else timeout_s)
    deadline_s, received_ns = time.monotonic() + limit_s, time.perf_counter_ns()
    validate_generate(message)
    tenant = caller.tenant_of(message.tenant)
    model, identity, system_fingerprint, eos_token_ids = await router.model(timeout_s)
    _check_system(message, router, model, system_fingerprint)
    settings = router.settings
    check_range("n", message.n or 1, 1, min(settings.max_answers, settings.max_concurrency + settings.max_queue))
    is_resumed = bool(message.resume_ids or message.system_fingerprint)  # the latter: broken before the first token
    if not is_resumed:
        check_num_draft_tokens(message.speculation, model, router)
    prompt_ids = await _prompt_ids(message, model, router)
    sampling = _sampling(message, model, len(prompt_ids), router.tokenizer)
    predicted_ids = await _predicted_ids(message, model, router)
    drafter = _drafter(message, router, is_predicted=bool(predicted_ids), is_resumed=is_resumed)
    constraint = await check_constraint(message, model, sampling, eos_token_ids, prompt_ids, router)
    return GenerationRequest(
        request_id=request_id,
        model=message.model or model.model_id,
        prompt_ids=array("I", prompt_ids),  # a tenth of the memory of Python's own numbers
        sampling=sampling,
        mode=_mode(message.speculation, model),
        **_typical_bounds(message.speculation),
        eos_token_ids=eos_token_ids,
        max_length=len(prompt_ids) + sampling.max_new_tokens,
        identity=identity,
        system_fingerprint=system_fingerprint,
        resume_ids=tuple(message.resume_ids),
        num_received_logprobs=_num_received_logprobs(message, prompt_ids),
        constraint=constraint,
        predicted_ids=predicted_ids,
        drafter=drafter,
        is_resumed=is_resumed,
        is_drafter_fixed=bool(message.speculation.drafter.name or message.speculation.drafter.settings),
        num_draft_tokens=message.speculation.num_draft_tokens or default_num_draft_tokens(model, router),
        reports_rounds=message.speculation.report_rounds,
        tenant=tenant,
        accounts=caller.accounts,
        traceparent=traceparent,
        deadline_s=deadline_s,
        received_ns=received_ns,
    )


def _drafter(message: GenerateRequest, router: Router, *, is_predicted: bool, is_resumed: bool) -> DrafterChoice | None:
    drafter = choose_drafter(message.speculation, router, is_resumed=is_resumed)
    if not is_predicted:
        return drafter
    return choose_predicting(drafter, message.speculation, router, is_resumed=is_resumed)


def _check_system(message: GenerateRequest, router: Router, model: WorkerHello, system_fingerprint: str) -> None:
    """Refuse what asks for another model or system."""
    if message.model and not router.verify.serves(message.model):
        raise NotFoundError(f"model {message.model!r} is not served here; {model.model_id!r} is")
    if message.system_fingerprint not in ("", system_fingerprint):
        raise FailedPreconditionError(
            f"system_fingerprint {message.system_fingerprint!r} is not served here; {system_fingerprint!r} is"
        )


def _sampling(message: GenerateRequest, model: WorkerHello, prompt_length: int, tokenizer: Tokenizer) -> SamplingParams:
    """How tokens are chosen, every field set. Refuses what the model cannot honour, and resumed ids that do not fit."""
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


def further_answers(first: GenerationRequest, num_answers: int) -> list[GenerationRequest]:
    """The requests of all answers but the first, each with its own seed and id."""
    further = []
    for index in range(1, num_answers):
        sampling = SamplingParams()
        sampling.CopyFrom(first.sampling)
        sampling.seed = derived_seed(first.sampling.seed, index)
        further.append(
            replace(
                first,
                request_id=f"{first.request_id}.{index}",
                sampling=sampling,
                num_received_logprobs=first.num_prompt_logprobs,
                is_further=True,
            )
        )
    return further


def _num_received_logprobs(message: GenerateRequest, prompt_ids: Sequence[int]) -> int:
    """Entries of the prompt's logprobs that the client has, all of them once it has a token."""
    check_num_received("resume_prompt_logprobs", message.resume_prompt_logprobs, message.sampling, len(prompt_ids))
    return len(prompt_ids) - 1 if message.resume_ids else message.resume_prompt_logprobs


def _check_stop_strings(stops: Sequence[str], tokenizer: Tokenizer) -> None:
    """Refuse what no answer can hold."""
    for index, stop in enumerate(stops):
        if absent := tokenizer.alphabet.absent(stop):
            limit = f"must be of characters that the model's tokens make: none makes {absent[0]!r}"
            raise InvalidArgumentError(f"sampling.stop[{index}]", stop, limit)


async def tokenize(message: TokenizeRequest, router: Router) -> Sequence[int]:
    """Ids of a text or chat, as `prepare` would make them.

    Raises:
        InvalidArgumentError: no input, or messages the model's template refuses.
    """
    validate_tokenize(message)
    if message.WhichOneof("input") == "prompt":
        return await _encode_prompt(message, router)
    return await _encode_messages(message.messages, router)


async def detokenize(message: DetokenizeRequest, router: Router, vocab_size: int) -> DetokenizeResponse:
    """Text of ids, and the bytes of each.

    Raises:
        InvalidArgumentError: no ids, too many, or one beyond the vocabulary.
    """
    validate_detokenize(message, vocab_size)
    tokenizer, ids = router.tokenizer, tuple(message.ids)

    def decode() -> DetokenizeResponse:
        return DetokenizeResponse(text=tokenizer.decode(ids), pieces=map(tokenizer.token_bytes, ids))

    return decode() if len(ids) <= _DECODED_AT_ONCE else await on_text_thread(decode, len(ids))


async def _prompt_ids(message: GenerateRequest, model: WorkerHello, router: Router) -> Sequence[int]:
    """The input's ids, up to the context's size."""
    ids: Sequence[int]
    match field := message.WhichOneof("input"):
        case "prompt":
            ids = await _encode_prompt(message, router) or _beginning(message, router.tokenizer)
        case "messages":
            ids = await _encode_messages(message.messages, router)
        case _:
            field, ids = "prompt_ids.ids", message.prompt_ids.ids  # not copied before their number is checked
    validate_prompt_ids(ids, vocab_size=model.vocab_size, max_context=model.max_context, field=field)
    check_is_text(ids, model.media_token_ids, field)
    return ids


def _beginning(message: GenerateRequest, tokenizer: Tokenizer) -> Sequence[int]:
    """Return BOS, from which an empty prompt starts.

    Raises:
        InvalidArgumentError: the tokenizer has none, or special tokens are not wanted.
    """
    if tokenizer.bos_id is None or not _adds_special_tokens(message):
        raise InvalidArgumentError("prompt", "0 tokens", "must have a token unless BOS is added")
    return [tokenizer.bos_id]


async def _predicted_ids(message: GenerateRequest, model: WorkerHello, router: Router) -> Sequence[int]:
    """The predicted answer; empty without a prediction, or if it is empty."""
    field, ids = "prediction.ids.ids", cast(Sequence[int], message.prediction.ids.ids)
    if message.prediction.WhichOneof("kind") == "text":
        field, text = "prediction.text", message.prediction.text
        ids = await encode_text(text, router.tokenizer, _limits(router), field, add_special_tokens=False)
    if not ids:
        return ()
    validate_prompt_ids(ids, vocab_size=model.vocab_size, max_context=model.max_context, field=field)
    return array("I", ids)


def _limits(router: Router) -> TextLimits:
    served = router.verify.model
    max_tokens = served.hello.max_context if served is not None else _UNMET_MAX_TOKENS
    return TextLimits(router.settings.max_prompt_bytes, max_tokens)


async def _encode_prompt(message: GenerateRequest | TokenizeRequest, router: Router) -> Sequence[int]:
    adds = _adds_special_tokens(message)
    return await encode_text(message.prompt, router.tokenizer, _limits(router), add_special_tokens=adds)


def _adds_special_tokens(message: GenerateRequest | TokenizeRequest) -> bool:
    return message.add_special_tokens or not message.HasField("add_special_tokens")


async def _encode_messages(messages: ChatMessages, router: Router) -> Sequence[int]:
    return await encode_chat(chat_of(messages), router.tokenizer, _limits(router))


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
