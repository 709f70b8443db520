"""Ids of a client's text, chat or ids, and text of ids, within the limits of the router and its model.

Long texts are tokenized on threads, so that they block no stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast

from betoken.common.errors import InvalidArgumentError
from betoken.router.core import Router
from betoken.router.text.chat import chat_of
from betoken.router.text.encoding import TextLimits, encode_chat, encode_text, on_text_thread
from betoken.router.text.infill_prompt import encode_infill
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.sampling import max_new_tokens
from betoken.rpc.validation import check_is_text, validate_detokenize, validate_prompt_ids, validate_tokenize
from betoken.v1.generation_pb2 import DetokenizeRequest, DetokenizeResponse, GenerateRequest, TokenizeRequest
from betoken.v1.types_pb2 import WorkerHello

_DECODED_AT_ONCE = 4096  # more ids are turned into text on a thread: about a millisecond
_UNMET_MAX_TOKENS = 1 << 17
"""Maximum number of tokens of a text until a worker has reported the model's context."""


async def tokenize(message: TokenizeRequest, router: Router) -> Sequence[int]:
    """Ids of a text or chat, as `prompt_ids` returns them.

    Raises:
        InvalidArgumentError: no input, or messages that the model's template rejects.
    """
    validate_tokenize(message)
    return await _encode(message, router)


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


async def prompt_ids(message: GenerateRequest, model: WorkerHello, router: Router) -> Sequence[int]:
    """Ids of a request's input.

    Raises:
        InvalidArgumentError: no ids, too many for the model's context, or ids that no text has.
    """
    ids: Sequence[int]
    match field := message.WhichOneof("input"):
        case "prompt":
            ids = await _encode(message, router) or _beginning(message, router.tokenizer)
        case "messages":
            ids = await _encode(message, router)
        case "infill":
            num_new_tokens = max_new_tokens(message.sampling, model)
            ids = await encode_infill(message.infill, router.tokenizer, _limits(router), num_new_tokens)
        case _:
            field, ids = "prompt_ids.ids", message.prompt_ids.ids  # not copied before their number is checked
    validate_prompt_ids(ids, vocab_size=model.vocab_size, max_context=model.max_context, field=field)
    check_is_text(ids, model.media_token_ids, field)
    return array("I", ids)  # a tenth of the memory of Python's own numbers


async def predicted_ids(message: GenerateRequest, model: WorkerHello, router: Router) -> Sequence[int]:
    """Ids of a request's predicted answer; empty without a prediction, or if it is empty.

    Raises:
        InvalidArgumentError: too many for the model's context, or an id beyond its vocabulary.
    """
    field, ids = "prediction.ids.ids", cast(Sequence[int], message.prediction.ids.ids)
    if message.prediction.WhichOneof("kind") == "text":
        field, text = "prediction.text", message.prediction.text
        ids = await encode_text(text, router.tokenizer, _limits(router), field, add_special_tokens=False)
    if not ids:
        return ()
    validate_prompt_ids(ids, vocab_size=model.vocab_size, max_context=model.max_context, field=field)
    return array("I", ids)


async def _encode(message: GenerateRequest | TokenizeRequest, router: Router) -> Sequence[int]:
    """Ids of a message's text or chat."""
    if message.WhichOneof("input") == "messages":
        return await encode_chat(chat_of(message.messages), router.tokenizer, _limits(router))
    adds = _adds_special_tokens(message)
    return await encode_text(message.prompt, router.tokenizer, _limits(router), add_special_tokens=adds)


def _beginning(message: GenerateRequest, tokenizer: Tokenizer) -> Sequence[int]:
    """Return BOS, from which an empty prompt starts.

    Raises:
        InvalidArgumentError: the tokenizer has none, or special tokens are not wanted.
    """
    if tokenizer.bos_id is None or not _adds_special_tokens(message):
        raise InvalidArgumentError("prompt", "0 tokens", "must have a token unless BOS is added")
    return [tokenizer.bos_id]


def _adds_special_tokens(message: GenerateRequest | TokenizeRequest) -> bool:
    return message.add_special_tokens or not message.HasField("add_special_tokens")


def _limits(router: Router) -> TextLimits:
    served = router.verify.model
    max_tokens = served.hello.max_context if served is not None else _UNMET_MAX_TOKENS
    return TextLimits(router.settings.max_prompt_bytes, max_tokens)
