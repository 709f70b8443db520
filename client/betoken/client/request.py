"""Keyword arguments to protocol messages.

Refuses what a message cannot hold, naming the field; every other limit is the router's to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from typing import Any, TypeAlias, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from betoken.client.config import GenerateOptions, Sampling, Speculation, VerificationMode
from betoken.client.modes import TO_PROTO
from betoken.common.errors import InvalidArgumentError
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2


class ChatMessage(TypedDict):
    """One chat message."""

    role: str
    """"system", "user", "assistant", or what the model's chat template knows."""
    content: str


Prompt: TypeAlias = str | Sequence[int | ChatMessage]
"""Text, or token ids, or chat messages; one Sequence, since of two mypy takes no message that is written in place."""

_BYTES = bytes | bytearray | memoryview  # sequences of integers, but none that is meant as ids
_OTHER_FIELDS = ("model", "tenant", "resume_ids", "system_fingerprint")
_KINDS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "valid Unicode text",
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request for `prompt`; `timeout_s` and `headers` are no part of it.

    Raises:
        InvalidArgumentError: a value no message can hold.
        TypeError: an unknown option.
    """
    known = {*_names(Sampling), *_names(Speculation), *_OTHER_FIELDS, "sampling", "speculation", "timeout_s", "headers"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
    request = pb.GenerateRequest()
    _set_input(request, prompt)
    _fill(request, {name: options.get(name) for name in _OTHER_FIELDS}, "")
    given = cast(Mapping[str, Any], options)
    _set_sampling(request.sampling, _merged("sampling", Sampling, given))
    _set_speculation(request.speculation, _merged("speculation", Speculation, given))
    return request


def tokenize_request(prompt: str | Sequence[ChatMessage]) -> pb.TokenizeRequest:
    """The request that turns text or chat messages into ids as `generate` would.

    Raises:
        InvalidArgumentError: a value no message can hold.
    """
    request = pb.TokenizeRequest()
    _set_input(request, prompt)
    return request


def detokenize_request(ids: Sequence[int]) -> pb.DetokenizeRequest:
    """The request for the text of `ids`.

    Raises:
        InvalidArgumentError: a value no message can hold.
    """
    request = pb.DetokenizeRequest()
    _fill(request, {"ids": ids}, "")
    return request


def _set_input(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        with _refusing("prompt", prompt, "must be valid Unicode text"):
            request.prompt = prompt
    elif isinstance(prompt, Mapping | Set | _BYTES) or not _has_length(prompt):
        raise InvalidArgumentError(
            "prompt", type(prompt).__name__, "must be text, token ids or a list of chat messages"
        )
    elif isinstance(next(iter(prompt), None), Mapping):  # not prompt[0], which a view of a mapping's values lacks
        for index, message in enumerate(cast(Sequence[ChatMessage], prompt)):
            with _refusing(f"messages[{index}]", message, 'must be {"role": text, "content": text}'):
                request.messages.messages.add(**message)
            for name in ("role", "content"):
                if message.get(name) is None:  # which protobuf takes for the empty text
                    raise InvalidArgumentError(f"messages[{index}].{name}", "absent", "must be text")
    elif isinstance(request, pb.GenerateRequest):
        request.prompt_ids.SetInParent()
        with _refusing("prompt_ids", prompt, "must be integers from 0 to 2**32 - 1"):
            request.prompt_ids.ids.extend(cast(Sequence[int], prompt))
    else:
        raise InvalidArgumentError("prompt", prompt, "must be text or a list of chat messages")


def _has_length(prompt: Any) -> bool:
    try:
        len(prompt)
    except TypeError:  # also of an array that is a single number
        return False
    return True


def _merged(option: str, kind: type[Sampling | Speculation], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the `kind` given as `option`, replaced by those given by their own names."""
    config, names = given.get(option), _names(kind)
    if config is not None and not isinstance(config, kind):
        raise InvalidArgumentError(option, config, f"must be a {kind.__name__}")
    values = {name: getattr(config, name) for name in names} if config is not None else {}
    return values | {name: given[name] for name in names if given.get(name) is not None}


def _names(kind: type[Sampling | Speculation]) -> list[str]:
    return [field.name for field in fields(kind)]


def _mapping(field: str, value: Any, limit: str) -> Mapping[Any, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise InvalidArgumentError(field, value, limit)
    return value or {}


def _set_sampling(message: types_pb2.SamplingParams, values: dict[str, Any]) -> None:
    message.SetInParent()
    stop = values.pop("stop", None)
    if stop is not None:
        values["stop"] = [stop] if isinstance(stop, str) else stop
    limit = "must map ids from 0 to 2**32 - 1 to numbers"
    for token_id, value in _mapping("sampling.logit_bias", values.pop("logit_bias", None), limit).items():
        with _refusing("sampling.logit_bias", {token_id: value}, limit):
            if token_id is None or value is None:  # which protobuf takes for 0
                raise TypeError
            message.logit_bias.add(token_id=token_id, bias=value)
    _fill(message, values, "sampling.")


def _set_speculation(message: pb.Speculation, values: dict[str, Any]) -> None:
    drafter = values.pop("drafter", None)
    limit = "must map text to text or numbers"
    settings = _mapping("speculation.drafter.settings", values.pop("drafter_settings", None), limit)
    mode = values.pop("mode", None)
    if drafter is not None:
        with _refusing("speculation.drafter.name", drafter, "must be text"):
            message.drafter.name = drafter
    for name, value in settings.items():
        with _refusing("speculation.drafter.settings", {name: value}, limit):
            if not isinstance(value, str | Real):
                raise TypeError
            message.drafter.settings[name] = str(value)
    if mode is not None:
        try:
            message.mode = TO_PROTO[VerificationMode(mode)]
        except ValueError:
            raise InvalidArgumentError("speculation.mode", mode, f"must be one of {', '.join(TO_PROTO)}") from None
    _fill(message, values, "speculation.")


def _fill(message: Any, values: Mapping[str, Any], prefix: str) -> None:
    """Sets every field that is not None."""
    for name, value in values.items():
        if value is None:
            continue
        kind = message.DESCRIPTOR.fields_by_name[name]
        number = "a list, each " if kind.is_repeated else ""
        with _refusing(prefix + name, value, f"must be {number}{_KINDS[kind.cpp_type]}"):
            if kind.is_repeated:
                if isinstance(value, _BYTES):
                    raise TypeError
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)


@contextmanager
def _refusing(field: str, value: object, limit: str) -> Iterator[None]:
    """Turns protobuf's refusal of a value into the error that names the field."""
    try:
        yield
    except (TypeError, ValueError, OverflowError):  # the last: an integer beyond any float
        raise InvalidArgumentError(field, value, limit) from None
