"""Undecodable requests: a typed refusal naming the field, instead of gRPC's UNKNOWN.

gRPC decodes before it calls a handler, and reports a failure there with its exception's text. Here the failure is kept
in the call's own context, and `servicing.typed_errors` raises it inside the handler. Links decode for themselves.
The handler alone holds the decoded message, so it can free a large request while the call goes on.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from betoken.common.errors import InvalidArgumentError

_MAX_FIELDS = 16384  # that are looked at, some 20 ms; other calls wait meanwhile
_MAX_DECODED_FIELDS = 1 << 16
"""Most fields of a request; a field of two bytes may become a message of fifty."""
_FEW_BYTES = 2 * _MAX_DECODED_FIELDS  # cannot hold more fields
_refusal: ContextVar[InvalidArgumentError | None] = ContextVar("refusal", default=None)


def raise_if_undecodable() -> None:
    """Inside a handler: refuse the call if its request could not be decoded.

    Raises:
        InvalidArgumentError: naming the text field that is not UTF-8, or the whole request.
    """
    refusal = _refusal.get()
    if refusal is not None:
        raise refusal


class TypedDecoding(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Installs the decoder above on every method that takes one request."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC once per call."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        if inspect.iscoroutinefunction(handler.unary_unary):
            handler = handler._replace(unary_unary=_opening(handler.unary_unary))
        elif inspect.iscoroutinefunction(handler.unary_stream):
            handler = handler._replace(unary_stream=_opening(handler.unary_stream))
        elif inspect.isasyncgenfunction(handler.unary_stream):
            handler = handler._replace(unary_stream=_opening_generator(handler.unary_stream))
        else:  # a decoder that runs on a thread
            return handler._replace(request_deserializer=_keeping_refusals(handler.request_deserializer))
        return handler._replace(request_deserializer=_boxing(_keeping_refusals(handler.request_deserializer)))


class _Box:
    """A request on its way from gRPC, which keeps what it has decoded until the call ends, to the handler."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message: Message | None = message

    def open(self) -> Message | None:
        message, self._message = self._message, None
        return message


def _boxing(decode: Callable[[bytes], Message]) -> Callable[[bytes], _Box]:
    return lambda data: _Box(decode(data))


def _opening(behave: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[_Box, Any], Awaitable[Any]]:
    async def behave_with_content(box: _Box, context: Any) -> Any:
        return await behave(box.open(), context)

    return behave_with_content


def _opening_generator(behave: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[_Box, Any], AsyncIterator[Any]]:
    async def behave_with_content(box: _Box, context: Any) -> AsyncIterator[Any]:
        async for response in behave(box.open(), context):
            yield response

    return behave_with_content


def _keeping_refusals(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    def decode_or_keep(data: bytes) -> Message:
        try:
            if len(data) <= _FEW_BYTES:
                return decode(data)
            empty = decode(b"")
            if not _has_too_many_fields(empty.DESCRIPTOR, data):
                return decode(data)
            limit = f"must be at most {_MAX_DECODED_FIELDS} fields, numbers of a list packed"
            _refusal.set(InvalidArgumentError("request", "more fields", limit))
        except DecodeError:
            empty = decode(b"")
            _refusal.set(_explain(empty.DESCRIPTOR, data))
        return empty

    return decode_or_keep


def _has_too_many_fields(descriptor: Any, data: bytes) -> bool:
    try:
        return sum(1 for _ in _all_fields(descriptor, data, iter(range(_MAX_DECODED_FIELDS)))) >= _MAX_DECODED_FIELDS
    except (IndexError, ValueError):
        return False  # for the decoder to say


def _all_fields(descriptor: Any, data: bytes, budget: Iterator[int]) -> Iterator[None]:
    """Every field on the wire, including fields of nested messages, up to the remaining `budget`."""
    for (number, value), _ in zip(_fields(data), budget, strict=False):
        yield None
        field: Any = descriptor.fields_by_number.get(number)
        if field is not None and value is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _all_fields(field.message_type, value, budget)


def _explain(descriptor: Any, data: bytes) -> InvalidArgumentError:
    try:
        for path, text in _texts(descriptor, data, "", iter(range(_MAX_FIELDS))):
            try:
                text.decode()
            except UnicodeDecodeError as error:
                return InvalidArgumentError(path, text[error.start : error.end], "must be valid UTF-8")
    except (IndexError, ValueError):
        pass
    return InvalidArgumentError("request", f"{len(data)} undecodable bytes", f"must be a {descriptor.full_name}")


def _texts(descriptor: Any, data: bytes, prefix: str, budget: Iterator[int]) -> Iterator[tuple[str, bytes]]:
    """Every text field on the wire, by path, among as many fields as the remaining `budget`."""
    counts: dict[int, int] = {}
    for (number, value), _ in zip(_fields(data), budget, strict=False):
        field: Any = descriptor.fields_by_number.get(number)
        if field is None or not isinstance(value, bytes):
            continue
        index = counts[number] = counts.get(number, -1) + 1
        path = f"{prefix}{field.name}[{index}]" if field.is_repeated else f"{prefix}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path, value
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from _texts(field.message_type, value, f"{path}.", budget)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Field numbers on the wire, with the content of the length-delimited ones.

    Raises:
        IndexError, ValueError: the bytes are cut short or no protobuf.
    """
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        value: bytes | None = None
        match tag & 7:
            case 0:
                _, position = _varint(data, position)
            case 1:
                position += 8
            case 2:
                length, position = _varint(data, position)
                value = data[position : position + length]
                position += length
            case 5:
                position += 4
            case _:
                raise ValueError("groups are not used")
        if position > len(data):
            raise IndexError("cut short")
        yield tag >> 3, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a varint of more than 64 bits")
