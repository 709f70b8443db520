"""Keyword arguments to protocol messages.

Refuses what a message cannot hold, naming the field; every other limit is the router's to check.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields
from numbers import Real
from typing import Any, NotRequired, TypeAlias, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor

from betoken.client.config import Constraint, GenerateOptions, PromptOptions, Sampling, Speculation, VerificationMode
from betoken.client.modes import TO_PROTO
from betoken.common.errors import InvalidArgumentError
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2


class ChatMessage(TypedDict):
    """One chat message; any further key, as `name`, goes to the model's chat template, too."""

    role: str
    """"system", "user", "assistant", or what the model's chat template knows."""
    content: str
    name: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    """Calls of an assistant: [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}]."""
    tool_call_id: NotRequired[str]
    """Id of the call whose result a tool's content is."""
    reasoning_content: NotRequired[str]


Prompt: TypeAlias = str | Sequence[int | ChatMessage]
"""Text, or token ids, or chat messages; one Sequence, since of two mypy takes no message that is written in place."""

_BYTES = bytes | bytearray | memoryview  # sequences of integers, but none that is meant as ids
_CONSTRAINTS = ("json_object", "json_schema", "regex", "choice", "lark")
_NOT_FIELDS = (
    "timeout_s",
    "headers",
)
_OTHER_FIELDS = ("model", "tenant", "resume_ids", "system_fingerprint", "add_special_tokens", "n")
_KINDS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_UINT32: "an integer from 0 to 2**32 - 1",
    FieldDescriptor.CPPTYPE_UINT64: "an integer from 0 to 2**64 - 1",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "valid Unicode text",
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """The request for `prompt`; `timeout_s` and `headers` stay apart from it.

    Raises:
        InvalidArgumentError: a value no message can hold.
        TypeError: an unknown option.
    """
    known = {*_names(Sampling), *_names(Speculation), *_OTHER_FIELDS, "sampling", "speculation", *_NOT_FIELDS}
    known |= {"constraint", "prediction", "suffix", "files"}
    known |= PromptOptions.__annotations__.keys()
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
    request = pb.GenerateRequest()
    _set_input(request, prompt)
    _set_infill(request, options.get("suffix"), options.get("files"))
    _set_chat_options(request, options)
    _fill(request, {name: options.get(name) for name in _OTHER_FIELDS}, "")
    _set_constraint(request, options.get("constraint"))
    _set_prediction(request, options.get("prediction"))
    given = cast(Mapping[str, Any], options)
    _set_sampling(request.sampling, _merged("sampling", Sampling, given))
    _set_speculation(request.speculation, _merged("speculation", Speculation, given))
    return request


def tokenize_request(prompt: str | Sequence[ChatMessage], options: PromptOptions | None = None) -> pb.TokenizeRequest:
    """The request that turns text or chat messages into ids as `generate` would.

    Raises:
        InvalidArgumentError: a value no message can hold.
    """
    options = options or {}
    unknown = sorted(options.keys() - PromptOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"tokenize() got an unexpected keyword argument {unknown[0]!r}")
    request = pb.TokenizeRequest()
    _set_input(request, prompt)
    _set_chat_options(request, options)
    _fill(request, {"add_special_tokens": options.get("add_special_tokens")}, "")
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
            _add_message(request, index, message)
    elif isinstance(request, pb.GenerateRequest):
        request.prompt_ids.SetInParent()
        with _refusing("prompt_ids", prompt, "must be integers from 0 to 2**32 - 1"):
            request.prompt_ids.ids.extend(cast(Sequence[int], prompt))
    else:
        raise InvalidArgumentError("prompt", prompt, "must be text or a list of chat messages")


def _set_infill(request: pb.GenerateRequest, suffix: str | None, files: Sequence[tuple[str, str]] | None) -> None:
    """Turn a text into the part before a gap."""
    if suffix is None:
        if files:
            raise InvalidArgumentError("infill.files", "set", "needs a suffix")
        return
    if request.WhichOneof("input") != "prompt":
        raise InvalidArgumentError("infill.suffix", "set", "needs a prompt of text")
    infill = pb.Infill(prefix=request.prompt)
    with _refusing("infill.suffix", suffix, "must be valid Unicode text"):
        infill.suffix = suffix
    for index, file in enumerate(files or ()):
        with _refusing(f"infill.files[{index}]", file, "must be a name and a text"):
            name, text = file
            if name is None or text is None:  # which protobuf takes for the empty text
                raise TypeError
            infill.files.add(name=name, text=text)
    request.infill.CopyFrom(infill)


def _add_message(request: pb.GenerateRequest | pb.TokenizeRequest, index: int, message: ChatMessage) -> None:
    name = f"messages[{index}]"
    for key in ("role", "content"):
        if message.get(key) is None:  # which protobuf takes for the empty text
            raise InvalidArgumentError(f"{name}.{key}", "absent", "must be text")
    further = {key: value for key, value in message.items() if key not in ("role", "content")}
    with _refusing(name, message, 'must be {"role": text, "content": text}, and JSON under further keys'):
        extra = json.dumps(further, ensure_ascii=False) if further else ""
        request.messages.messages.add(role=message["role"], content=message["content"], extra=extra)


def _set_chat_options(
    request: pb.GenerateRequest | pb.TokenizeRequest, options: GenerateOptions | PromptOptions
) -> None:
    """Inputs of a template besides messages."""
    tools, arguments = options.get("tools"), options.get("template_arguments")
    continues, escapes = options.get("continue_final_message"), options.get("escape_special_tokens")
    given = {
        "tools": tools,
        "template_arguments": arguments,
        "continue_final_message": continues,
        "escape_special_tokens": escapes,
    }
    name = next((name for name, value in given.items() if value), None)
    if name is None:
        return
    if request.WhichOneof("input") != "messages":
        raise InvalidArgumentError(name, "set", "needs a prompt of chat messages")
    with _refusing("tools", tools, "must be a list of JSON objects"):
        request.messages.tools.extend(json.dumps(dict(tool), ensure_ascii=False) for tool in tools or ())
    if arguments:
        with _refusing("template_arguments", arguments, "must be a JSON object"):
            request.messages.template_arguments = json.dumps(dict(arguments), ensure_ascii=False)
    request.messages.continue_final_message = bool(continues)
    request.messages.escape_special_tokens = bool(escapes)


def _set_constraint(request: pb.GenerateRequest, constraint: Constraint | None) -> None:
    if constraint is None:
        return
    limit = f"must be a mapping with one of {', '.join(_CONSTRAINTS)}"
    given = {kind: value for kind, value in _mapping("constraint", constraint, limit).items() if value is not None}
    if len(given) != 1 or not given.keys() <= set(_CONSTRAINTS):
        raise InvalidArgumentError("constraint", sorted(map(str, given)), limit)
    ((kind, value),) = given.items()
    message = request.constraint
    if kind == "choice":
        with _refusing("constraint.choice", value, "must be a list of texts"):
            if isinstance(value, str | _BYTES):
                raise TypeError
            message.choice.texts.extend(value)
    elif kind == "json_schema" and not isinstance(value, str):
        with _refusing("constraint.json_schema", value, "must be a JSON schema"):
            message.json_schema = json.dumps(value, ensure_ascii=False)
    else:
        _fill(message, {kind: value}, "constraint.")


def _set_prediction(request: pb.GenerateRequest, prediction: str | Sequence[int] | None) -> None:
    if isinstance(prediction, str):
        with _refusing("prediction.text", prediction, "must be valid Unicode text"):
            request.prediction.text = prediction
    elif prediction is not None:
        with _refusing("prediction.ids.ids", prediction, "must be integers from 0 to 2**32 - 1"):
            if isinstance(prediction, _BYTES):
                raise TypeError
            request.prediction.ids.ids.extend(prediction)
            request.prediction.ids.SetInParent()


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
