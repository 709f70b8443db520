"""Attributes of a request's span: its own, and attributes that the conventions require of all spans and durations of a
generation.

Without an exporter all of it is a no-op. Prompts and text never enter.
"""

from __future__ import annotations

from opentelemetry.util.types import AttributeValue

from betoken.common import names
from betoken.common.trace import Span
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.events import Finished


def describe_request(span: Span, request: GenerationRequest, is_chat: bool) -> None:
    """A request's span attributes, once it is known to be valid."""
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        **kind_attributes(request.model, is_chat),
        names.GEN_AI_REQUEST_MAX_TOKENS: sampling.max_new_tokens,
        names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
        names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
        names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
        names.GEN_AI_USAGE_INPUT_TOKENS: len(request.prompt_ids),
        names.TENANT: request.tenant,
        names.DRAFTER: request.drafter.name if request.drafter is not None else "",
        names.NUM_DRAFT_TOKENS: request.num_draft_tokens,
    }
    span.set_attributes(attributes)


def describe_answer(span: Span, event: Finished) -> None:
    """An answer's span attributes."""
    span.set_attributes(
        {
            names.GEN_AI_RESPONSE_FINISH_REASONS: (event.reason.value,),
            names.GEN_AI_USAGE_OUTPUT_TOKENS: event.num_output_tokens,
            names.NUM_ACCEPTED: event.counts.stats.num_accepted_tokens,
            names.QUEUE_MS: event.queue_ns / 1e6,
        }
    )


def kind_attributes(model: str, is_chat: bool) -> dict[str, str]:
    """Attributes of every span and duration of a generation, by the semantic conventions. The model is one that is
    served."""
    return {
        names.GEN_AI_OPERATION_NAME: names.OPERATION_CHAT if is_chat else names.OPERATION_TEXT_COMPLETION,
        names.GEN_AI_PROVIDER_NAME: names.PROVIDER_BETOKEN,
        names.GEN_AI_REQUEST_MODEL: model,
    }
