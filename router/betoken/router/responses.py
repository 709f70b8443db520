"""The events of a generation as messages of the public service."""

from __future__ import annotations

from betoken.router.round.events import Event, Finished, PromptLogprobsPart, Started, Tokens
from betoken.router.text.answer import FinishReason
from betoken.v1 import generation_pb2 as pb

_REASONS = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}


def response_of(event: Event, index: int) -> pb.GenerateResponse:
    """The message of an event of the answer with this index."""
    match event:
        case Tokens():
            return _tokens(event, index)
        case PromptLogprobsPart(first_position, logprobs):
            part = pb.GeneratePromptLogprobs(first_position=first_position, logprobs=logprobs)
            return pb.GenerateResponse(answer=index, prompt_logprobs=part)
        case Started(request, drafter):
            return pb.GenerateResponse(
                answer=index,
                start=pb.GenerateStart(
                    prompt_ids=request.prompt_ids,
                    seed=request.sampling.seed,
                    model=request.model,
                    request_id=request.request_id,
                    mode=request.mode,
                    drafter=drafter,
                    sampling=request.sampling,
                    system_fingerprint=request.system_fingerprint,
                ),
            )
        case Finished():
            return pb.GenerateResponse(answer=index, finish=finish_of(event))


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


def finish_of(event: Finished) -> pb.GenerateFinish:
    """The last message of an answer."""
    return pb.GenerateFinish(
        reason=_REASONS[event.reason],
        stop=event.stop,
        usage=pb.Usage(
            prompt_tokens=event.num_prompt_tokens,
            output_tokens=event.num_output_tokens,
            cached_prompt_tokens=event.num_cached_tokens,
        ),
        speculation=event.counts.stats,
        queue_ns=event.queue_ns,
        time_to_first_token_ns=event.time_to_first_token_ns,
        duration_ns=event.duration_ns,
    )
