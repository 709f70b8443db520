"""Requests whose bytes are no such message: a typed refusal naming the field, instead of gRPC's UNKNOWN.

gRPC decodes before it calls a handler, and reports a failure there with its exception's text. Here the failure is kept
in the call's own context, and `servicing.typed_errors` raises it inside the handler. Links decode for themselves.
"""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from foretoken.rpc.errors import InvalidArgumentError

_LENGTH_DELIMITED = 2
_MAX_EXPLAINED_BYTES = 1 << 14  # some 30 ms where all are tiny fields; other calls wait meanwhile
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
        return handler._replace(request_deserializer=_keeping_refusals(handler.request_deserializer))


def _keeping_refusals(decode: Callable[[bytes], Message]) -> Callable[[bytes], Message]:
    def decode_or_keep(data: bytes) -> Message:
        try:
            return decode(data)
        except DecodeError:
            empty = decode(b"")
            _refusal.set(_explain(empty.DESCRIPTOR, data))
            return empty

    return decode_or_keep


def _explain(descriptor: Any, data: bytes) -> InvalidArgumentError:
    path = _find_bad_text(descriptor, data) if len(data) <= _MAX_EXPLAINED_BYTES else ""
    if path:
        return InvalidArgumentError(path, "bytes that are not UTF-8", "must be valid UTF-8")
    return InvalidArgumentError("request", f"{len(data)} undecodable bytes", f"must be a {descriptor.full_name}")


def _find_bad_text(descriptor: Any, data: bytes) -> str:
    """Path of the first text field in `data` that is not UTF-8; empty if none, or if the framing itself is broken."""
    try:
        unknown: Any = UnknownFieldSet(Empty.FromString(data))  # iterable, which the stubs forget
    except DecodeError:
        return ""
    for entry in unknown:
        field = descriptor.fields_by_number.get(entry.field_number)
        if field is None or entry.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                entry.data.decode()
            except UnicodeDecodeError:
                return str(field.name)
        elif field.message_type is not None:
            path = _find_bad_text(field.message_type, entry.data)
            if path:
                return f"{field.name}.{path}"
    return ""
